/** The present state: one number a tile, each with a sentence that says what it is. */

import { UNKNOWN, compact, count, duration, element, fixed, regimeLabel, setText, signed } from "./dom.js";

const GAIN_RECORDS = 32; // records over which the gain is a mean

const TILES = [
  ["State", state],
  ["Live loss", liveLoss],
  ["Gain over the backbone", gain],
  ["Lag", lag],
  ["Speed", speed],
  ["Records trained", records],
  ["Regime now", regimeNow],
  ["Average forgetting", forgetting],
  ["Backward transfer", transfer],
  ["Last snapshot", snapshot],
  ["Dead letters", deadLetters],
  ["Abstentions", abstentions],
];

/** One tile for each of `TILES`. */
export function tiles(host) {
  const shown = TILES.map(([title, read]) => {
    const [value, help] = [element("dd", { class: "value" }), element("dd", { class: "help" })];
    host.append(element("div", {}, element("dt", {}, title), value, help));
    return { read, value, help };
  });
  return (known) => {
    for (const { read, value, help } of shown) {
      const [text, meaning, tone = ""] = read(known);
      setText(value, text);
      setText(help, meaning);
      value.className = `value ${tone}`;
    }
  };
}

function state({ status }) {
  const tone = { running: "good", paused: "warn", failed: "bad" }[status.phase] ?? "";
  if (status.degraded) return [status.phase, status.degraded, "warn"];
  const meaning = status.reason ?? `step ${count(status.step)}, up for ${duration((Date.now() - Date.parse(status.started_at)) / 1000)}`;
  return [status.phase, meaning, tone];
}

function liveLoss({ status }) {
  const { last, smoothed } = status.prequential_loss_nats;
  return [fixed(smoothed), `nats per token before each update, smoothed; last batch ${fixed(last)}`];
}

/** Mean over the newest compared records of how much lower the loss is than the untouched backbone's. */
function gain({ history }) {
  const { sample_records: records, sample_loss: ours, backbone_loss: theirs } = history.points;
  let [number, sum] = [0, 0];
  for (let index = records.length - 1; index >= 0 && number < GAIN_RECORDS; index -= 1) {
    if (ours[index] == null) continue;
    number += records[index];
    sum += records[index] * (theirs[index] - ours[index]);
  }
  if (number === 0) return [UNKNOWN, "nats per token below the untouched backbone; nothing compared yet"];
  const tone = sum < 0 ? "bad" : "good";
  return [signed(sum / number), `nats per token below the untouched backbone, on the newest ${count(number)} compared records`, tone];
}

function lag({ status }) {
  const known = status.partitions.map((row) => row.lag).filter((value) => value !== null);
  const total = known.length === 0 ? null : known.reduce((sum, each) => sum + each, 0);
  const of = status.partitions.length;
  return [compact(total), `records that the stream is ahead, ${of} partition${of === 1 ? "" : "s"}`];
}

function speed({ status }) {
  const step = status.step_seconds === null ? "" : `; a step takes ${fixed(status.step_seconds, 2)} s`;
  return [compact(status.tokens_per_s), `tokens per second${step}`];
}

function records({ status }) {
  return [compact(status.records_trained), `and ${count(status.records_held_out)} held out, to measure forgetting`];
}

function regimeNow({ status, regimes }) {
  const { current_regime: number, num_regimes: of, num_shifts: shifts } = status;
  const meaning = `of ${of} remembered, after ${count(shifts.inputs)} shifts of inputs and ${count(shifts.answers)} of answers`;
  return [number === null ? UNKNOWN : regimeLabel(number, regimes), meaning];
}

function forgetting({ status }) {
  const value = status.forgetting.average_forgetting;
  const tone = value !== null && value > 0.05 ? "warn" : "";
  return [fixed(value), "AF: accuracy lost since its best, mean over past regimes; 0 is perfect", tone];
}

function transfer({ status }) {
  const value = status.forgetting.backward_transfer;
  return [signed(value), "BWT: accuracy gained by past regimes since they ended"];
}

function snapshot({ status }) {
  if (status.last_snapshot === null) return [UNKNOWN, "none written yet"];
  return [duration(status.last_snapshot.age_s), `ago, at step ${count(status.last_snapshot.step)}; a restart continues from it`];
}

function deadLetters({ status }) {
  const refusals = status.update_refusals ? `; ${count(status.update_refusals)} updates refused` : "";
  const ignored = Object.values(status.ignored).reduce((sum, number) => sum + number, 0);
  const others = ignored ? `; ${count(ignored)} ignored, such as deletions` : "";
  const tone = status.records_dead_lettered + status.update_refusals > 0 ? "warn" : "";
  return [count(status.records_dead_lettered), `unusable records, set aside${refusals}${others}`, tone];
}

function abstentions({ status }) {
  const { known, unknown } = status.requests;
  return [count(unknown), `of ${count(known + unknown)} requests that no regime explained`];
}
