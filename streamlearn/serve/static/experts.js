/** How the regimes use the experts, measured when asked for: the daemon runs the model over hold-out records for it. */

import { element, setText } from "./dom.js";
import { UNKNOWN, count, fixed } from "./format.js";
import { regimeLabel, regimeMark } from "./regime_style.js";
import { Table } from "./table.js";

const HELP = "Which experts the held-out tokens of each regime use. Training waits meanwhile, between two steps.";

export class Experts {
  #api;
  #button = element("button", { type: "button", onclick: () => this.#measure() }, "Measure the experts");
  #note = element("p", { class: "help", role: "status" }, HELP);
  #results = element("div", { hidden: true });
  #table;
  #rows = [];
  #regimes = null;

  constructor(host, api) {
    this.#api = api;
    host.append(element("div", { class: "actions" }, this.#button, this.#note), this.#results);
    this.#table = new Table(this.#results, {
      label: "Experts by regime",
      empty: "No regime was measured.",
      columns: [
        {
          title: "Regime",
          key: (row) => regimeLabel(row.regime, this.#regimes),
          cell: (row) => regimeMark(row.regime, this.#regimes),
        },
        { title: "Experts", cell: (row) => row.experts },
        { title: "Layers", cell: (row) => count(row.layers), right: true },
        { title: "Used by its tokens", cell: (row) => row.used, right: true },
        { title: "Mean CKA at its probe", cell: (row) => fixed(row.similarity, 2), right: true },
      ],
    });
  }

  /** Show what was measured under the present names of the regimes. */
  update({ regimes }) {
    this.#regimes = regimes;
    this.#table.update(this.#rows, (row) => row.regime);
  }

  async #measure() {
    this.#button.disabled = true;
    setText(this.#note, "Waiting for the loop …");
    try {
      const found = await this.#api.get("/v1/experts");
      this.#rows = [...owned(found.layers), ...shared(found.layers)];
      this.#table.update(this.#rows, (row) => row.regime);
      this.#results.hidden = false;
      setText(this.#note, summary(found));
    } catch (error) {
      setText(this.#note, error.message);
    }
    this.#button.disabled = false;
  }
}

/** Regimes that have experts of their own. */
function owned(layers) {
  const owners = [...new Set(layers.map((each) => each.owner))].filter((each) => each !== null);
  return owners.map((regime) => {
    const number = layers.filter((each) => each.owner === regime).length;
    return { regime, experts: "a bank of its own", layers: number, used: "all", similarity: null };
  });
}

/** Regimes that choose among experts that all of them share. */
function shared(layers) {
  const common = layers.filter((each) => each.owner === null);
  return (common[0]?.regimes ?? []).map(({ regime }) => {
    const rows = common.map((layer) => layer.regimes.find((each) => each.regime === regime));
    const tokens = rows.flatMap((row) => row?.holdout_tokens ?? []).flat();
    const used = tokens.length === 0 ? UNKNOWN : `${count(tokens.filter((each) => each > 0).length)} of ${count(tokens.length)}`;
    const similarity = mean(rows.flatMap((row) => row?.similarity ?? []).flat());
    return { regime, experts: "shared by all", layers: common.length, used, similarity };
  });
}

function summary({ step, layers, unmeasured, holdout_tokens: tokens, compositions, seconds }) {
  const kinds = mean(layers.map((each) => each.mean_effective_number).filter((each) => each !== null));
  const mixing =
    unmeasured ??
    `an expert serves ${fixed(kinds, 1)} of ${count(compositions)} kinds of token on average (N_eff, MH-MoE eq. 9),
     on ${count(tokens)} hold-out tokens`;
  return `At step ${count(step)}, in ${fixed(seconds, 1)} s: ${mixing}.`;
}

function mean(values) {
  return values.length === 0 ? null : values.reduce((sum, each) => sum + each, 0) / values.length;
}
