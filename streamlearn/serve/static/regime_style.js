/** How a regime is drawn: a number and a name, one of eight colours, and a line pattern beside the colour. */

import { element } from "./dom.js";

const NUM_COLOURS = 8; // as page.css has
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];

/** CSS class that sets the regime's colour. */
export function regimeClass(number) {
  return `regime-${(number - 1) % NUM_COLOURS}`;
}

/** CSS variable of the regime's colour. */
export function regimeColour(number) {
  return `--${regimeClass(number)}`;
}

/** Line pattern; regimes of one colour differ in it, and so do neighbours. */
export function regimeDash(number) {
  const index = number - 1;
  return DASHES[(index + Math.floor(index / NUM_COLOURS)) % DASHES.length];
}

/** "3", or "3 refunds" for a named one. */
export function regimeLabel(number, regimes) {
  const name = regimes?.regimes.find((each) => each.number === number)?.name;
  return name ? `${number} ${name}` : `${number}`;
}

/** Its number on its colour, and its name beside it. */
export function regimeMark(number, regimes) {
  const [digits, ...name] = regimeLabel(number, regimes).split(" ");
  const chip = element("span", { class: `chip ${regimeClass(number)}` }, digits);
  return element("span", { class: "regime" }, chip, ...(name.length ? [name.join(" ")] : []));
}
