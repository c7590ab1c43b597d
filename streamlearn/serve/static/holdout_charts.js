/** Accuracy and loss of each regime on its hold-out records, as they develop. */

import { aligned } from "./align.js";
import { Chart } from "./chart.js";
import { regimeColour, regimeDash, regimeLabel } from "./regime_style.js";

const MAX_LINES = 12; // more cannot be told apart; those with the newest records are drawn

export class HoldoutCharts {
  #accuracy;
  #loss;

  constructor(accuracyHost, lossHost) {
    this.#accuracy = new Chart(accuracyHost, { label: "Accuracy on hold-out by regime", digits: 3 });
    this.#loss = new Chart(lossHost, { label: "Loss on hold-out by regime", unit: "Nats per token.", digits: 3 });
  }

  /** Draw the scorings of the regimes. */
  update({ regimes, history }) {
    if (regimes === null) return;
    const newest = regimes.regimes.filter((each) => each.history.length > 0).sort(byLastRecord).slice(0, MAX_LINES);
    const drawn = newest.sort((one, other) => one.number - other.number);
    const draw = (chart, read) => {
      const series = drawn.map(({ history: scorings }) => ({
        x: scorings.map((each) => recordAt(each.step, history.points)),
        values: scorings.map(read),
      }));
      const { x, columns } = aligned(series);
      chart.update(x, drawn.map((regime, index) => line(regime, columns[index], regimes)));
    };
    draw(this.#accuracy, (each) => each.accuracy);
    draw(this.#loss, (each) => each.loss);
  }
}

function line({ number }, values, regimes) {
  const label = `regime ${regimeLabel(number, regimes)}`;
  return { label, values, colour: regimeColour(number), dash: regimeDash(number) };
}

function byLastRecord(one, other) {
  return (other.last_record ?? 0) - (one.last_record ?? 0);
}

/** The record that a step ended at. */
function recordAt(step, { step: steps = [], record = [] }) {
  let [low, high] = [0, steps.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return record[Math.min(low, record.length - 1)] ?? step;
}
