/** Every shift, with the evidence for it and what was done about it. */

import { element } from "./dom.js";
import { count, fixed } from "./format.js";
import { regimeMark } from "./regime_style.js";
import { Table } from "./table.js";

const ANSWERS_CHANGED =
  "Its hold-out records, their scores and its usual loss were forgotten, and its importance, where it is kept, was " +
  "released: its experts learn the new answers.";

export class ShiftTable {
  #table;
  #regimes = null;

  constructor(host) {
    const named = () => JSON.stringify(this.#regimes?.regimes.map((each) => each.name));
    this.#table = new Table(host, {
      label: "Shifts",
      tall: true,
      empty: "The stream has not begun.",
      columns: [
        { title: "Record", cell: (row) => count(row.declared_at), right: true },
        { title: "Changed", cell: kind },
        {
          title: "Regime",
          key: (row) => `${row.previous} ${row.regime} ${named()}`,
          cell: (row) => way(row, this.#regimes),
        },
        { title: "Statistic", cell: (row) => (row.previous === null ? "" : fixed(row.statistic, 2)), right: true },
        { title: "Threshold", cell: (row) => (row.previous === null ? "" : fixed(row.threshold, 2)), right: true },
        { title: "Delay", cell: (row) => (row.previous === null ? "" : count(row.declared_at - row.onset)), right: true },
        { title: "What was done", cell: done, wide: true },
      ],
    });
  }

  /** Show the shifts of the state. */
  update({ shifts, regimes }) {
    this.#regimes = regimes;
    this.#table.update([...(shifts?.shifts ?? [])].reverse(), (row) => `${row.kind} ${row.number}`);
  }
}

function kind(row) {
  if (row.previous === null) return "first regime";
  return row.kind === "answers" ? "◆ answers" : "▾ inputs";
}

function way({ previous, regime }, regimes) {
  const marks = previous === null || previous === regime ? [] : [regimeMark(previous, regimes), " → "];
  return element("span", {}, ...marks, regimeMark(regime, regimes));
}

/** What the daemon did about a shift, in a sentence. */
function done(row) {
  if (row.kind === "answers") return ANSWERS_CHANGED;
  const said = [entered(row)];
  if (row.probe_tokens > 0) said.push(`Probed ${count(row.probe_tokens)} tokens in ${fixed(row.probe_seconds, 1)} s.`);
  if (row.mean_similarity !== null) said.push(`Mean CKA ${fixed(row.mean_similarity, 2)}.`);
  if (row.refused_return !== null) said.push(`Its inputs look like regime ${row.refused_return}'s; by its losses it is another.`);
  if (row.parent !== null) said.push(`Split from regime ${row.parent}, which goes on beside it.`);
  if (row.dropped !== null) said.push(`Regime ${row.dropped} made room for it.`);
  return said.join(" ");
}

function entered(row) {
  if (row.previous === null) return "The stream began.";
  if (row.known) return "Recognised: its own experts are used again.";
  return row.started_from === null
    ? "New: experts of its own, which begin from nothing."
    : `New: experts of its own, which begin as a copy of regime ${row.started_from}'s.`;
}
