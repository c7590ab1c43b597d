/** What is published of each regime, what was held back, and the model servers. */

import { element, setText } from "./dom.js";
import { UNKNOWN, clock, count, fixed, words } from "./format.js";
import { regimeLabel, regimeMark } from "./regime_style.js";
import { Table } from "./table.js";

export class PublicationTable {
  #section;
  #summary = element("p", { class: "help" });
  #versions;
  #replicas;
  #regimes = null;

  /** @param {import("./controls.js").Controls} controls */
  constructor(section, host, controls) {
    this.#section = section;
    host.append(this.#summary);
    this.#versions = new Table(host, {
      label: "Published versions",
      empty: "No version yet: the untouched backbone answers.",
      columns: [
        {
          title: "Regime",
          key: (row) => regimeLabel(row.number, this.#regimes),
          cell: (row) => regimeMark(row.number, this.#regimes),
        },
        { title: "Version", cell: (row) => row.version ?? UNKNOWN },
        { title: "Held back", cell: (row) => (row.held_back === null ? "no" : words(row.held_back)) },
        { title: "Tested at step", cell: (row) => count(row.step), right: true },
        { title: "Records", cell: (row) => count(row.records), right: true },
        { title: "Loss", cell: (row) => fixed(row.loss), right: true },
        { title: "Published", cell: (row) => fixed(row.published_loss), right: true },
        { title: "Backbone", cell: (row) => fixed(row.backbone_loss), right: true },
        { title: "p", cell: (row) => fixed(row.p_value), right: true },
        {
          title: "Controls",
          key: (row) => String(row.held_back),
          cell: (row) => element("span", { class: "actions" }, ...controls.ofPublication(row)),
        },
      ],
    });
    const replicas = element("div");
    host.append(replicas);
    this.#replicas = new Table(replicas, {
      label: "Model servers",
      empty: "",
      columns: [
        { title: "Model server", cell: (row) => row.url },
        { title: "Answers", cell: (row) => (row.is_up ? "yes" : "no") },
        { title: "Loaded", cell: (row) => `${row.loaded} of ${row.wanted}`, right: true },
        { title: "Fault", cell: (row) => row.fault ?? "none", wide: true },
      ],
    });
  }

  /** Show the publication of the state; the section is hidden where nothing is published. */
  update({ publication, regimes }) {
    this.#section.hidden = !publication?.enabled;
    if (this.#section.hidden) return;
    this.#regimes = regimes;
    const at = publication.written_at === null ? "" : ` of ${clock(Date.parse(publication.written_at))}`;
    const newest = publication.sequence === null ? "Nothing is published yet." : `Publication ${publication.sequence}${at}.`;
    setText(this.#summary, [newest, publication.fault].filter(Boolean).join(" "));
    this.#versions.update(publication.regimes, (row) => row.number);
    this.#replicas.update(publication.replicas, (row) => row.url);
  }
}
