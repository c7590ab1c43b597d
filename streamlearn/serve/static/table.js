/** A table that changes in place: a cell is touched only if its content differs, so focus and selection stay. */

import { element } from "./dom.js";

/**
 * @typedef {object} Column
 * @property {string} title
 * @property {(row: any) => string | Node} cell What a cell shows.
 * @property {(row: any) => string} [key] For cells that are nodes: changes when the content does.
 * @property {boolean} [right] For numbers.
 * @property {boolean} [wide] For sentences.
 */
export class Table {
  #body = element("tbody");
  #rows = new Map();
  #columns;
  #empty;
  #scroll;

  /** @param {{label: string, columns: Column[], empty: string, tall?: boolean}} options */
  constructor(host, { label, columns, empty, tall = false }) {
    this.#columns = columns;
    const titles = columns.map((each) => element("th", { scope: "col", class: side(each) }, each.title));
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...titles)), this.#body);
    const reach = { class: tall ? "scroll tall" : "scroll", tabindex: "0", role: "region", "aria-label": `${label}, table` };
    this.#scroll = element("div", { ...reach, hidden: true }, table);
    this.#empty = element("p", { class: "empty" }, empty);
    host.append(this.#scroll, this.#empty);
  }

  /** Show these rows; `idOf` names a row from one time to the next. */
  update(rows, idOf) {
    this.#scroll.hidden = rows.length === 0;
    this.#empty.hidden = rows.length > 0;
    const shown = new Map(rows.map((row) => [String(idOf(row)), row]));
    for (const [id, known] of this.#rows) {
      if (shown.has(id)) continue;
      known.line.remove();
      this.#rows.delete(id);
    }
    let place = 0;
    for (const [id, row] of shown) {
      const { line, keys } = this.#rowOf(id);
      if (this.#body.children[place] !== line) this.#body.insertBefore(line, this.#body.children[place] ?? null);
      this.#columns.forEach((column, index) => fill(line.children[index], column, row, keys, index));
      place += 1;
    }
  }

  #rowOf(id) {
    if (!this.#rows.has(id)) {
      const cells = this.#columns.map((each) => element("td", { class: side(each) }));
      this.#rows.set(id, { line: element("tr", {}, ...cells), keys: [] });
    }
    return this.#rows.get(id);
  }
}

function fill(cell, column, row, keys, index) {
  const key = column.key ? column.key(row) : column.cell(row);
  if (keys[index] === key) return;
  keys[index] = key;
  cell.replaceChildren(column.key ? column.cell(row) : key);
}

function side({ right, wide }) {
  return right ? "right" : wide ? "wide" : undefined;
}
