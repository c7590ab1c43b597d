/** Records that could not be used: how many by reason, and the newest. */

import { element } from "./dom.js";
import { clock, count, words } from "./format.js";
import { Table } from "./table.js";

export class DeadLetters {
  #reasons;
  #newest;

  constructor(host) {
    this.#reasons = new Table(host, {
      label: "Dead letters by reason",
      empty: "None: every record could be used.",
      columns: [
        { title: "Reason", cell: (row) => words(row.reason) },
        { title: "Records", cell: (row) => count(row.number), right: true },
      ],
    });
    const newest = element("div");
    host.append(newest);
    this.#newest = new Table(newest, {
      label: "Newest dead letters",
      tall: true,
      empty: "",
      columns: [
        { title: "Newest", cell: (row) => clock(row.at * 1000) },
        { title: "Partition", cell: (row) => `${basename(row.topic)}:${row.partition}` },
        { title: "Offset", cell: (row) => count(row.offset), right: true },
        { title: "Why", cell: (row) => row.message || words(row.reason), wide: true },
      ],
    });
  }

  /** Show the dead letters of the state. */
  update({ status, history }) {
    const reasons = Object.entries(status.dead_letters).map(([reason, number]) => ({ reason, number }));
    this.#reasons.update(reasons.filter((each) => each.number > 0), (row) => row.reason);
    this.#newest.update([...history.deadLetters].reverse(), (row) => `${row.topic} ${row.partition} ${row.offset}`);
  }
}

/** A topic as it is, a file without its folders. */
function basename(topic) {
  return topic.slice(topic.lastIndexOf("/") + 1);
}
