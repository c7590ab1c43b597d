/** A line chart along the stream, with its legend, a sentence for those who do not see it, and its values. */

import { color, compact, count, element, fixed, lineSample, onThemeChange, setText } from "./dom.js";

const TABLE_ROWS = 20;
const FONT = "11px system-ui, sans-serif";

/**
 * @typedef {object} Line
 * @property {string} label
 * @property {(number|null)[]} values
 * @property {string} color CSS variable.
 * @property {number[]} [dash]
 * @property {number} [width]
 * @property {boolean} [faint] Drawn behind, without a row in the legend.
 */
export class Chart {
  #options;
  #figure;
  #plot;
  #legend;
  #rows;
  #details;
  #empty = element("p", { class: "empty" });
  #drawn = null;
  #look = "";
  #data = null;
  #visible = false;

  /** @param {{label: string, unit?: string, x?: string, height?: number, digits?: number, empty?: string, 
   *   range?: () => number[]|null, behind?: (plot: uPlot) => void}} options `range` gives the ends of the horizontal axis,
   *   `behind` draws what lies behind the lines. */
  constructor(host, options) {
    this.#options = { height: 200, digits: 2, x: "record", unit: "", empty: "Nothing yet.", ...options };
    this.#plot = element("div", { class: "plot", role: "img", style: { "--plot-height": `${this.#options.height}px` } });
    this.#legend = element("ul", { class: "legend" });
    this.#rows = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${options.label}, values` });
    this.#details = element("details", { ontoggle: () => this.#fillRows() }, element("summary", {}, "Values"), this.#rows);
    this.#figure = element("figure", { class: "chart" }, this.#legend, this.#plot, this.#empty, this.#details);
    host.append(this.#figure);
    new ResizeObserver(() => this.#resize()).observe(this.#plot);
    new IntersectionObserver(([seen]) => this.#onSeen(seen.isIntersecting)).observe(this.#plot);
    onThemeChange(() => this.#rebuild());
  }

  /** @param {number[]} x @param {Line[]} lines */
  update(x, lines) {
    this.#data = { x, lines };
    this.#describe();
    this.#fillRows();
    if (this.#visible) this.#draw();
  }

  #onSeen(visible) {
    this.#visible = visible;
    if (visible && this.#data) this.#draw();
  }

  #draw() {
    if (typeof uPlot === "undefined" || !this.#hasValues()) return;
    const { x, lines } = this.#data;
    const look = JSON.stringify(lines.map(({ values, ...style }) => style));
    if (look !== this.#look) this.#rebuild(look);
    else this.#drawn.setData([x, ...lines.map((line) => line.values)]);
  }

  #rebuild(look = this.#look) {
    if (!this.#data || typeof uPlot === "undefined" || look === "") return;
    this.#drawn?.destroy();
    this.#look = look;
    const { x, lines } = this.#data;
    this.#drawn = new uPlot(this.#uplotOptions(lines), [x, ...lines.map((line) => line.values)], this.#plot);
    const named = lines.filter((line) => !line.faint);
    this.#legend.replaceChildren(
      ...named.map((line) => element("li", {}, lineSample(line.color, line.dash ?? []), line.label)),
    );
  }

  #uplotOptions(lines) {
    const { height, behind, digits, range } = this.#options;
    const page = getComputedStyle(document.documentElement);
    const [left, right] = ["--plot-left", "--plot-right"].map((name) => Number.parseInt(page.getPropertyValue(name)));
    const axis = { stroke: color("--muted"), font: FONT, ticks: { show: false }, grid: { stroke: color("--line"), width: 1 } };
    return {
      width: this.#plot.clientWidth,
      height,
      padding: [8, right, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: (_, low, high) => range?.() ?? [low, high] }, y: { range: padded } },
      axes: [
        { ...axis, size: 24, values: (_, ticks) => ticks.map((each) => tick(each, 0)), grid: { show: false } },
        { ...axis, size: left, values: (_, ticks) => ticks.map((each) => tick(each, digits)) },
      ],
      series: [{}, ...lines.map(uplotSeries)],
      hooks: { drawClear: behind ? [behind] : [] },
    };
  }

  #resize() {
    const width = this.#plot.clientWidth;
    if (this.#drawn && width > 0 && width !== this.#drawn.width) this.#rebuild();
  }

  #hasValues() {
    return this.#data.lines.some((line) => newest(line.values) !== undefined);
  }

  #describe() {
    const { lines } = this.#data;
    const last = lines.filter((line) => !line.faint).map((line) => `${line.label} ${this.#number(newest(line.values))}`);
    const text = this.#hasValues() ? last.join(", ") : "nothing yet";
    this.#plot.setAttribute("aria-label", `${this.#options.label}: ${text}`);
    const missing = typeof uPlot === "undefined";
    setText(this.#empty, missing ? "No charts: install streamlearn with the extra page." : this.#options.empty);
    this.#empty.hidden = this.#hasValues() && !missing;
    this.#plot.hidden = !this.#empty.hidden;
    this.#details.hidden = !this.#hasValues();
  }

  #fillRows() {
    if (!this.#details.open || !this.#data) return;
    const { x, lines } = this.#data;
    const shown = lines.filter((line) => !line.faint);
    const indices = x.map((_, index) => index).filter((index) => shown.some((line) => line.values[index] != null));
    const head = [this.#options.x, ...shown.map((line) => line.label)];
    const titles = head.map((title) => element("th", { scope: "col", class: "right" }, title));
    const rows = indices.slice(-TABLE_ROWS).reverse().map((index) => {
      const cells = [count(x[index]), ...shown.map((line) => this.#number(line.values[index]))];
      return element("tr", {}, ...cells.map((text) => element("td", { class: "right" }, text)));
    });
    const body = [element("thead", {}, element("tr", {}, ...titles)), element("tbody", {}, ...rows)];
    const caption = element("caption", {}, `The newest ${rows.length} of ${indices.length} points. ${this.#options.unit}`);
    this.#rows.replaceChildren(element("table", {}, caption, ...body));
  }

  #number(value) {
    return fixed(value, this.#options.digits);
  }
}

function uplotSeries(line) {
  return {
    stroke: color(line.color),
    width: line.width ?? 2,
    dash: line.dash ?? [],
    alpha: line.faint ? 0.35 : 1,
    spanGaps: true,
    points: { show: line.values.filter((each) => each != null).length < 30, size: 4 },
  };
}

/** A range with some air, also where all values are equal. */
function padded(_, low, high) {
  if (low == null || high == null) return [0, 1];
  const air = (high - low || Math.abs(high) || 1) * 0.08;
  return [low >= 0 ? Math.max(0, low - air) : low - air, high + air];
}

/** A mark of an axis; empty between the numbers that the axis can show. */
function tick(value, digits) {
  if (Math.abs(value) >= 1000) return compact(value);
  const shown = Number(value.toFixed(digits));
  return Math.abs(shown - value) < 1e-9 ? String(shown) : "";
}

function newest(values) {
  return values.findLast((each) => each != null);
}

/**
 * @param {{x: number[], values: (number|null)[]}[]} series Each with a rising axis.
 * @returns {{x: number[], columns: (number|null)[][]}}
 */
export function aligned(series) {
  const x = [...new Set(series.flatMap((each) => each.x))].sort((one, other) => one - other);
  const columns = series.map((each) => {
    const known = new Map(each.x.map((place, index) => [place, each.values[index]]));
    return x.map((place) => known.get(place) ?? null);
  });
  return { x, columns };
}

/**
 * Exponentially smoothed values. What counts is how many records lie between two values, so that a rare one is not
 * outweighed by an old one.
 */
export function smoothed(values, numbers, records) {
  let [mean, since] = [null, 0];
  return values.map((value, index) => {
    since += numbers[index];
    if (value == null) return null;
    const keep = mean === null ? 0 : Math.exp(-since / records);
    mean = keep === 0 ? value : keep * mean + (1 - keep) * value;
    since = 0;
    return mean;
  });
}
