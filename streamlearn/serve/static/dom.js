/** Elements without markup in strings: whatever a value holds, it is shown as text. */

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
export function lineSample(colour, dash) {
  const svg = document.createElementNS(SVG, "svg");
  const line = document.createElementNS(SVG, "line");
  const drawn = { x1: 0, x2: 26, y1: 4, y2: 4, "stroke-width": 2.5, "stroke-dasharray": dash.join(" ") };
  for (const [name, value] of Object.entries(drawn)) line.setAttribute(name, value);
  line.style.setProperty("stroke", `var(${colour})`);
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
