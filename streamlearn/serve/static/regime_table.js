/** Every regime with its figures and its bank of experts, and the controls of each. */

import { element } from "./dom.js";
import { UNKNOWN, count, fixed } from "./format.js";
import { regimeMark } from "./regime_style.js";
import { Table } from "./table.js";

export class RegimeTable {
  #table;
  #regimes = null;
  #shifts = null;

  /** @param {import("./controls.js").Controls} controls */
  constructor(host, controls) {
    this.#table = new Table(host, {
      label: "Regimes",
      empty: "No record was read yet.",
      columns: [
        {
          title: "Regime",
          key: (row) => `${row.name} ${row.current} ${row.frozen}`,
          cell: (row) => element("span", {}, regimeMark(row.number, this.#regimes), stateOf(row)),
        },
        { title: "Records", cell: (row) => count(row.records), right: true },
        { title: "Visits", cell: (row) => count(row.visits), right: true },
        { title: "Last seen", cell: (row) => count(row.last_record), right: true },
        { title: "Live loss", cell: (row) => fixed(row.prequential_loss), right: true },
        { title: "Hold-out loss", cell: (row) => fixed(row.history.at(-1)?.loss), right: true },
        { title: "Accuracy", cell: (row) => fixed(row.history.at(-1)?.accuracy), right: true },
        { title: "Best", cell: (row) => fixed(row.best_accuracy), right: true },
        { title: "Held out", cell: (row) => count(row.holdout_records), right: true },
        { title: "Bank", cell: (row) => String(row.slot), right: true },
        { title: "Experts began from", cell: (row) => this.#origin(row) },
        {
          title: "Controls",
          key: (row) => `${row.name} ${row.frozen}`,
          cell: (row) => element("span", { class: "actions" }, ...controls.ofRegime(row)),
        },
      ],
    });
  }

  /** Show the regimes of the state. */
  update({ regimes, shifts }) {
    this.#regimes = regimes;
    this.#shifts = shifts;
    this.#table.update(regimes?.regimes ?? [], (row) => row.number);
  }

  #origin({ number }) {
    const entered = this.#shifts?.shifts.find((each) => each.regime === number && each.kind === "inputs" && !each.known);
    if (entered === undefined) return UNKNOWN;
    return entered.started_from === null ? "nothing" : `regime ${entered.started_from}`;
  }
}

function stateOf({ current, frozen }) {
  return [current && " now", frozen && " frozen"].filter(Boolean).join(",");
}
