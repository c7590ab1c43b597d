/** Tokens per second, and lag, along the stream. */

import { Chart } from "./chart.js";

export class SpeedCharts {
  #speed;
  #lag;

  constructor(speedHost, lagHost) {
    this.#speed = new Chart(speedHost, { label: "Speed along the stream", unit: "Tokens per second.", height: 140, digits: 0 });
    this.#lag = new Chart(lagHost, { label: "Lag along the stream", unit: "Records.", height: 140, digits: 0 });
  }

  /** Draw the points of the history. */
  update({ history }) {
    const { record = [], tokens_per_s: speed = [], lag = [] } = history.points;
    this.#speed.update(record, [{ label: "tokens per second", values: speed, colour: "--regime-2" }]);
    this.#lag.update(record, [{ label: "lag, records", values: lag, colour: "--regime-3", dash: [7, 4] }]);
  }
}
