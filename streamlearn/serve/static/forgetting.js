/** The accuracy matrix as it develops, and the two means that it is read by. */

import { Chart } from "./chart.js";
import { element } from "./dom.js";
import { count, fixed } from "./format.js";
import { regimeMark } from "./regime_style.js";

const MAX_ROWS = 14; // the newest segments
const MAX_COLUMNS = 14; // the regimes with the newest records
const MAX_SHADE = 55; // per cent: text on it stays readable

export class Forgetting {
  #host;
  #chart;
  #key = "";

  constructor(matrixHost, chartHost) {
    this.#host = matrixHost;
    this.#chart = new Chart(chartHost, { label: "Average forgetting and backward transfer", digits: 3 });
  }

  /** Show the matrix and the series of the state. */
  update({ history, regimes }) {
    const { points } = history;
    this.#chart.update(points.record ?? [], [
      { label: "average forgetting (AF)", values: points.average_forgetting ?? [], colour: "--regime-1" },
      { label: "backward transfer (BWT)", values: points.backward_transfer ?? [], colour: "--regime-0", dash: [7, 4] },
    ]);
    if (regimes !== null) this.#showMatrix(history.segments, regimes);
  }

  #showMatrix(segments, regimes) {
    const columns = [...regimes.regimes]
      .sort((one, other) => (other.last_record ?? 0) - (one.last_record ?? 0))
      .slice(0, MAX_COLUMNS)
      .sort((one, other) => one.number - other.number);
    const ended = segments.filter((each) => each.ended && Object.keys(each.accuracy).length > 0).slice(-MAX_ROWS);
    const now = Object.fromEntries(columns.map((each) => [each.number, each.history.at(-1)?.accuracy]));
    const rows = [
      ...ended.map((each) => ({ regime: each.regime, title: `at record ${count(each.last_record)}`, accuracy: each.accuracy })),
      { regime: regimes.current, title: "now", accuracy: now },
    ];
    const key = JSON.stringify([rows, columns.map((each) => [each.number, each.name])]);
    if (key === this.#key) return;
    this.#key = key;
    const scored = Object.values(now).some((each) => each !== undefined);
    this.#host.replaceChildren(scored ? matrix(rows, columns, regimes) : waiting());
  }
}

function matrix(rows, columns, regimes) {
  const corner = element("th", { scope: "col" }, "After the segment of");
  const titles = columns.map((each) => element("th", { scope: "col" }, regimeMark(each.number, regimes)));
  const body = rows.map((row) => {
    const head = element("th", { scope: "row" }, regimeMark(row.regime, regimes), ` ${row.title}`);
    return element("tr", {}, head, ...columns.map((each) => cell(row, each.number)));
  });
  const table = element(
    "table",
    { class: "matrix" },
    element("thead", {}, element("tr", {}, corner, ...titles)),
    element("tbody", {}, ...body),
  );
  const reach = { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Accuracy matrix" };
  return element("div", reach, table);
}

function cell({ regime, accuracy }, column) {
  const value = accuracy[column];
  const share = `${Math.round((value ?? 0) * MAX_SHADE)}%`;
  return element("td", { class: column === regime ? "own" : undefined, style: { "--share": share } }, value == null ? "" : fixed(value, 2));
}

function waiting() {
  return element("p", { class: "empty" }, "No hold-out record was scored yet.");
}
