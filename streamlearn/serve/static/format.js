/** Numbers as people read them. What is not known is a dash. */

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
