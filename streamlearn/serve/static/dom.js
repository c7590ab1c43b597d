/** Elements without markup in strings, numbers as people read them, colors, and the marks of regimes. */

const SVG = "http://www.w3.org/2000/svg";

/** The element with this id, which index.html has. */
export function byId(id) {
  return document.getElementById(id);
}

/**
 * Make an element.
 *
 * @param {string} tag
 * @param {Record<string, unknown>} attributes `on...` are listeners, `style` is an object of CSS properties, the rest
 *   are attributes; one that is false or undefined is left out.
 * @param {...(Node|string)} children
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) set(made, name, value);
  made.append(...children);
  return made;
}

/** The sample of a line in a legend. */
export function lineSample(color, dash) {
  const svg = document.createElementNS(SVG, "svg");
  const line = document.createElementNS(SVG, "line");
  const drawn = { x1: 0, x2: 26, y1: 4, y2: 4, "stroke-width": 2.5, "stroke-dasharray": dash.join(" ") };
  for (const [name, value] of Object.entries(drawn)) line.setAttribute(name, value);
  line.style.setProperty("stroke", `var(${color})`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(line);
  return svg;
}

/** Set the text of an element, and touch it only if it differs. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function set(node, name, value) {
  if (value === undefined || value === false) return;
  if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
  else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
  else node.setAttribute(name, value === true ? "" : value);
}

export const UNKNOWN = "–";

const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-GB", { notation: "compact", maximumSignificantDigits: 3 });

/** 12,345 */
export function count(value) {
  return value == null ? UNKNOWN : whole.format(value);
}

/** 12.3K */
export function compact(value) {
  return value == null ? UNKNOWN : Math.abs(value) < 10_000 ? whole.format(value) : short.format(value);
}

/** A number with a fixed number of digits after the point. */
export function fixed(value, digits = 3) {
  return value == null ? UNKNOWN : value.toFixed(digits);
}

/** The same with its sign, because the sign is what it is read for. */
export function signed(value, digits = 3) {
  if (value == null) return UNKNOWN;
  const text = Math.abs(value).toFixed(digits);
  return Number(text) === 0 ? text : `${value < 0 ? "−" : "+"}${text}`;
}

/** 42 s, 3 min, 5 h, 2 d */
export function duration(seconds) {
  if (seconds == null) return UNKNOWN;
  for (const [unit, size] of [["d", 86_400], ["h", 3_600], ["min", 60]]) {
    if (seconds >= 2 * size) return `${Math.floor(seconds / size)} ${unit}`;
  }
  return `${Math.floor(seconds)} s`;
}

/** 14:03:27, with the date if it is not today's. */
export function clock(milliseconds) {
  const at = new Date(milliseconds);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-GB")} ${time}`;
}

/** 12.3 MB */
export function bytes(value) {
  return value == null ? UNKNOWN : value < 1e6 ? `${(value / 1e3).toFixed(0)} kB` : `${(value / 1e6).toFixed(1)} MB`;
}

/** not_json becomes "not json". */
export function words(name) {
  return name.replaceAll("_", " ");
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const probe = element("span", { hidden: true });

/** The color that a CSS variable has now, as a canvas takes it. */
export function color(variable) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.setProperty("color", `var(${variable})`);
  return getComputedStyle(probe).color;
}

/** Call when the colors change. */
export function onThemeChange(listener) {
  dark.addEventListener("change", listener);
}

const NUM_COLORS = 8; // as page.css has
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];

/** CSS class that sets the regime's color. */
export function regimeClass(number) {
  return `regime-${(number - 1) % NUM_COLORS}`;
}

/** CSS variable of the regime's color. */
export function regimeColor(number) {
  return `--${regimeClass(number)}`;
}

/** Line pattern; regimes of one color differ in it, and so do neighbours. */
export function regimeDash(number) {
  const index = number - 1;
  return DASHES[(index + Math.floor(index / NUM_COLORS)) % DASHES.length];
}

/** "3", or "3 refunds" for a named one. */
export function regimeLabel(number, regimes) {
  const name = regimes?.regimes.find((each) => each.number === number)?.name;
  return name ? `${number} ${name}` : `${number}`;
}

/** Its number on its color, and its name beside it. */
export function regimeMark(number, regimes) {
  const [digits, ...name] = regimeLabel(number, regimes).split(" ");
  const chip = element("span", { class: `chip ${regimeClass(number)}` }, digits);
  return element("span", { class: "regime" }, chip, ...(name.length ? [name.join(" ")] : []));
}
