/** One line above the figures: what was done, or why the figures are old. */

import { setText } from "./dom.js";

const SHOWN_MS = 8000;

export class Notice {
  #host;
  #problem = "";
  #timer = null;

  constructor(host) {
    this.#host = host;
  }

  /** Show a sentence for a while. */
  say(text, bad = false) {
    clearTimeout(this.#timer);
    this.#show(text, bad);
    this.#timer = setTimeout(() => this.#show(this.#problem, true), SHOWN_MS);
  }

  /** Show a sentence until there is another one; an empty one when all is well. */
  problem(text) {
    const changed = text !== this.#problem;
    this.#problem = text;
    if (changed) this.#show(text, true);
  }

  #show(text, bad) {
    this.#host.hidden = text === "";
    this.#host.classList.toggle("bad", bad);
    setText(this.#host, text);
  }
}
