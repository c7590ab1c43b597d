/** The snapshots on disk, and the controls of each. */

import { element } from "./dom.js";
import { bytes, clock, count } from "./format.js";
import { Table } from "./table.js";

export class SnapshotTable {
  #table;

  /** @param {import("./controls.js").Controls} controls */
  constructor(host, controls) {
    this.#table = new Table(host, {
      label: "Snapshots",
      tall: true,
      empty: "None written yet.",
      columns: [
        { title: "Step", cell: (row) => count(row.step), right: true },
        { title: "Written", cell: (row) => clock(Date.parse(row.written_at)) },
        { title: "Size", cell: (row) => bytes(row.size_bytes), right: true },
        { title: "Kept", cell: (row) => (row.pinned ? "pinned" : "until pruned") },
        {
          title: "Controls",
          key: (row) => String(row.pinned),
          cell: (row) => element("span", { class: "actions" }, ...controls.ofSnapshot(row)),
        },
      ],
    });
  }

  /** Show the snapshots of the state. */
  update({ snapshots }) {
    this.#table.update(snapshots?.snapshots ?? [], (row) => row.name);
  }
}
