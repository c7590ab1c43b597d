/** Colours of page.css for the canvas, which knows no CSS variables. */

import { element } from "./dom.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
const probe = element("span", { hidden: true });

/** The colour that a CSS variable has now, as a canvas takes it. */
export function colour(variable) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.setProperty("color", `var(${variable})`);
  return getComputedStyle(probe).color;
}

/** Call when the colours change. */
export function onThemeChange(listener) {
  dark.addEventListener("change", listener);
}
