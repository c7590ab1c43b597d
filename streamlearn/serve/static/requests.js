/** What was asked of the model, what answered, and how often no regime explained the request. */

import { Chart } from "./chart.js";
import { element, setText } from "./dom.js";
import { count, fixed } from "./format.js";
import { Table } from "./table.js";

const EXPLAINED = {
  regime: "the experts of the regime that explains the request",
  adapter: "the experts of a preset that knows no regimes",
  mean: "the mean of the regimes' adapters",
  backbone: "the untouched backbone, which the request named",
};
const UNEXPLAINED = {
  regime: "no regime explains it: the experts of the nearest, or of the one that it named",
  adapter: "no regime explains it: the experts of a preset that knows no regimes",
  mean: "abstention: the mean of the regimes' adapters",
  backbone: "abstention: the untouched backbone",
};

export class Requests {
  #table;
  #fallback = element("p", { class: "help" });
  #chart;

  constructor(host, chartHost) {
    this.#table = new Table(host, {
      label: "Requests by what answered",
      empty: "No request yet.",
      columns: [
        { title: "Answered by", cell: (row) => row.meaning, wide: true },
        { title: "Requests", cell: (row) => count(row.number), right: true },
      ],
    });
    host.append(this.#fallback);
    this.#chart = new Chart(chartHost, { label: "Requests along the stream", height: 140, digits: 0, empty: "Nothing yet: requests are drawn with the next batch." });
  }

  /** Show the requests of the state. */
  update({ status, history }) {
    this.#table.update(answered(status.requests), (row) => row.meaning);
    setText(this.#fallback, fallback(status.unknown_requests));
    const { points } = history;
    this.#chart.update(points.record ?? [], [
      { label: "requests answered so far", values: running(points.requests), colour: "--accent" },
      { label: "abstentions so far", values: running(points.unexplained_requests), colour: "--regime-1", dash: [7, 4] },
    ]);
  }
}

/** A row for each way in which requests were answered. */
function answered({ answered_by: all, unknown_answered_by: unexplained }) {
  const rows = Object.keys(all).flatMap((name) => [
    { meaning: EXPLAINED[name], number: all[name] - unexplained[name] },
    { meaning: UNEXPLAINED[name], number: unexplained[name] },
  ]);
  return rows.filter((row) => row.number > 0);
}

/** What answers the unexplained now, and on which evidence. */
function fallback(found) {
  const losses = [["mean", found.mean_loss], ["nearest regime", found.nearest_loss], ["backbone", found.backbone_loss]];
  const measured = losses.filter(([, loss]) => loss !== null).map(([name, loss]) => `${name} ${fixed(loss, 2)}`);
  const why = measured.length === 0 ? "" : ` Loss of new regimes' first records, before learning: ${measured.join(", ")}.`;
  return `Unexplained requests go to the ${found.answered_by} now (serve.unknown: ${found.setting}).${why}`;
}

/** The sum so far; nothing before the first. */
function running(values = []) {
  let sum = 0;
  return values.map((each) => (sum += each) || null);
}
