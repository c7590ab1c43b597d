/** The stream from its first record to its newest, as coloured segments with the number of their regime. */

import { element } from "./dom.js";
import { count } from "./format.js";
import { regimeClass, regimeLabel } from "./regime_style.js";

const MAX_MARKS = 60; // more would run into each other

export class Ribbon {
  #host;
  #key = "";

  constructor(host) {
    this.#host = host;
  }

  /** Draw the segments and the shifts of the state. */
  update({ history, shifts, regimes }) {
    const { segments } = history;
    const [start, end] = [segments[0]?.first_record ?? 1, segments.at(-1)?.last_record ?? 0];
    const declared = (shifts?.shifts ?? []).filter((each) => each.previous !== null && each.declared_at >= start);
    const marked = declared.slice(-MAX_MARKS);
    const shown = segments.map((each) => [regimeLabel(each.regime, regimes), each.last_record]);
    const key = JSON.stringify([shown, marked.length]);
    if (key === this.#key) return;
    this.#key = key;
    const bars = segments.map((each) => bar(each, regimes));
    const marks = marked.map((each) => mark(each, (each.onset - start) / Math.max(1, end - start + 1)));
    this.#host.replaceChildren(
      element("ol", { "aria-label": "Segments of the stream, oldest first" }, ...bars),
      element("div", { class: "marks", "aria-hidden": "true" }, ...marks),
    );
  }
}

function bar(segment, regimes) {
  const { regime, first_record: first, last_record: last } = segment;
  const joined = segment.joined > 1 ? `, ${segment.joined} segments together` : "";
  const text = `regime ${regimeLabel(regime, regimes)}, records ${count(first)} to ${count(last)}${joined}`;
  const number = element("span", { "aria-hidden": "true" }, String(regime));
  return element(
    "li",
    { class: regimeClass(regime), title: text, style: { "flex-grow": String(last - first + 1) } },
    number,
    element("span", { class: "hidden" }, text),
  );
}

function mark(shift, place) {
  const title = `${shift.kind} shift at record ${count(shift.declared_at)}`;
  return element("span", { title, style: { left: `${100 * place}%` } }, shift.kind === "answers" ? "◆" : "▾");
}
