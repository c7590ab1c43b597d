/** Prequential loss beside the untouched backbone's, over the regimes of the stream. */

import { smoothed } from "./align.js";
import { Chart } from "./chart.js";
import { regimeColour } from "./regime_style.js";
import { colour } from "./theme.js";

const SMOOTHED_RECORDS = 16;
const BAND_ALPHA = 0.09;

export class LossChart {
  #chart;
  #segments = [];

  constructor(host) {
    this.#chart = new Chart(host, {
      label: "Loss along the stream",
      unit: "Nats per token.",
      digits: 3,
      height: 250,
      range: () => this.#range(),
      behind: (plot) => this.#drawRegimes(plot),
    });
  }

  /** Draw the points of the history. */
  update({ history }) {
    const { points } = history;
    this.#segments = history.segments;
    const mean = (name) => smoothed(points[name] ?? [], points.records ?? [], SMOOTHED_RECORDS);
    this.#chart.update(points.record ?? [], [
      { label: "each batch", values: points.loss ?? [], colour: "--accent", width: 1, faint: true },
      { label: "what was learned, before each update", values: mean("loss"), colour: "--accent" },
      {
        label: "the same on a sample",
        values: mean("sample_loss"),
        colour: "--regime-2",
        dash: [2, 3],
      },
      {
        label: "the untouched backbone on that sample",
        values: mean("backbone_loss"),
        colour: "--regime-1",
        dash: [7, 4],
      },
    ]);
  }

  /** First and last record, as the ribbon above has them. */
  #range() {
    const first = this.#segments[0];
    return first === undefined ? null : [first.first_record, this.#segments.at(-1).last_record + 1];
  }

  #drawRegimes(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.globalAlpha = BAND_ALPHA;
    for (const { regime, first_record: first, last_record: last } of this.#segments) {
      const [from, to] = [plot.valToPos(first, "x", true), plot.valToPos(last + 1, "x", true)];
      ctx.fillStyle = colour(regimeColour(regime));
      ctx.fillRect(from, bbox.top, to - from, bbox.height);
    }
    ctx.restore();
  }
}
