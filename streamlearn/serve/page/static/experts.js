/** How the experts are used, measured when asked for: the daemon runs the model over the hold-out records for it. */

import { element, setText } from "./dom.js";
import { count, fixed, UNKNOWN } from "./format.js";
import { regimeMark } from "./regime_style.js";
import { Table } from "./table.js";

export class Experts {
  #api;
  #button;
  #note;
  #table;
  #regimes = null;

  constructor(host, api) {
    this.#api = api;
    this.#button = element("button", { type: "button", onclick: () => this.#measure() }, "Measure the experts");
    const help = "How evenly tokens use the experts. Training waits for the measurement, between two steps.";
    this.#note = element("p", { class: "help", role: "status" }, help);
    const results = element("div", { hidden: true });
    host.append(element("div", { class: "actions" }, this.#button, this.#note), results);
    this.#table = new Table(results, {
      label: "Experts by regime",
      empty: "The preset has no experts to count.",
      columns: [
        { title: "Experts of", key: (row) => `${row.owner}`, cell: (row) => owner(row, this.#regimes) },
        { title: "Layers", cell: (row) => count(row.layers), right: true },
        { title: "Heads × experts", cell: (row) => row.shape },
        { title: "Unused", cell: (row) => row.unused, right: true },
        { title: "Largest share", cell: (row) => fixed(row.largest, 2), right: true },
        { title: "Mean N_eff", cell: (row) => fixed(row.effective, 2), right: true },
      ],
    });
    this.results = results;
  }

  /** Remember the names of the regimes. */
  update({ regimes }) {
    this.#regimes = regimes;
  }

  async #measure() {
    this.#button.disabled = true;
    setText(this.#note, "Waiting for the loop …");
    try {
      const found = await this.#api.get("/v1/experts");
      this.#table.update(byOwner(found.layers), (row) => row.owner);
      this.results.hidden = false;
      const measured = found.unmeasured ?? `${count(found.holdout_tokens)} hold-out tokens in ${fixed(found.seconds, 1)} s`;
      setText(this.#note, `At step ${count(found.step)}: ${measured}. N_eff is the number of kinds of token that an expert
        serves, from 1 to ${count(found.compositions)} (MH-MoE eq. 9).`);
    } catch (error) {
      setText(this.#note, error.message);
    }
    this.#button.disabled = false;
  }
}

function owner(row, regimes) {
  return row.owner === null ? element("span", {}, "all regimes") : regimeMark(row.owner, regimes);
}

/** Layers summed up by the regime whose experts they hold. */
function byOwner(layers) {
  const owners = [...new Set(layers.map((each) => each.owner))];
  return owners.map((each) => {
    const own = layers.filter((layer) => layer.owner === each);
    const loads = own.flatMap((layer) => layer.load ?? []).flat();
    const effective = own.map((layer) => layer.mean_effective_number).filter((value) => value !== null);
    const [first] = own.map((layer) => layer.load ?? layer.importance ?? layer.effective_number).filter((grid) => grid !== null);
    return {
      owner: each,
      layers: own.length,
      shape: first ? `${first.length} × ${first[0].length}` : UNKNOWN,
      unused: loads.length ? count(loads.filter((load) => load === 0).length) : UNKNOWN,
      largest: loads.length ? Math.max(...own.flatMap((layer) => layer.share ?? []).flat()) : null,
      effective: effective.length ? effective.reduce((sum, value) => sum + value, 0) / effective.length : null,
    };
  });
}
