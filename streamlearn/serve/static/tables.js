/** The tables: shifts, regimes, requests, dead letters, snapshots, publications. */

import { UNKNOWN, bytes, clock, count, element, fixed, regimeLabel, regimeMark, setText, signed, words } from "./dom.js";
import { Table } from "./table.js";

const right = (title, cell) => ({ title, cell, right: true });

/** A column with the buttons of each row; `key` changes when they do. */
const buttons = (key, controlsOf) => ({
  title: "Controls",
  key,
  cell: (row) => element("span", { class: "actions" }, ...controlsOf(row)),
});

const ANSWERS_CHANGED =
  "Its hold-out records, their scores and its usual loss were forgotten, and its importance, where it is kept, was " +
  "released: its experts learn the new answers.";

/** Every shift, newest first, with its evidence and its consequences. */
export function shiftTable(host) {
  let regimes = null;
  const named = () => JSON.stringify(regimes?.regimes.map((regime) => regime.name));
  const evidence = (cell) => (row) => (row.previous === null ? "" : cell(row)); // the first regime is no shift
  const table = new Table(host, {
    label: "Shifts",
    tall: true,
    empty: "The stream has not begun.",
    columns: [
      right("Record", (row) => count(row.declared_at)),
      { title: "Changed", cell: changed },
      { title: "Regime", key: (row) => `${row.previous} ${row.regime} ${named()}`, cell: (row) => way(row, regimes) },
      right("Statistic", evidence((row) => fixed(row.statistic, 2))),
      right("Threshold", evidence((row) => fixed(row.threshold, 2))),
      right("Delay", evidence((row) => count(row.declared_at - row.onset))),
      { title: "What was done", cell: done, wide: true },
    ],
  });
  return (state) => {
    regimes = state.regimes;
    table.update([...(state.shifts?.shifts ?? [])].reverse(), (row) => `${row.kind} ${row.number}`);
  };
}

function changed(row) {
  if (row.previous === null) return "first regime";
  return row.kind === "answers" ? "◆ answers" : "▾ inputs";
}

function way({ previous, regime }, regimes) {
  const marks = previous === null || previous === regime ? [] : [regimeMark(previous, regimes), " → "];
  return element("span", {}, ...marks, regimeMark(regime, regimes));
}

/** The daemon's reaction to a shift, in a sentence. */
function done(row) {
  if (row.kind === "answers") return ANSWERS_CHANGED;
  const said = [entered(row)];
  if (row.probe_tokens > 0) said.push(`Probed ${count(row.probe_tokens)} tokens in ${fixed(row.probe_seconds, 1)} s.`);
  if (row.probe_losses !== null) said.push(transientExpert(row));
  if (row.refused_return !== null) said.push(`Its inputs look like regime ${row.refused_return}'s, but its losses do not.`);
  if (row.parent !== null) said.push(`Split from regime ${row.parent}, which continues beside it.`);
  if (row.dropped !== null) said.push(`Regime ${row.dropped} made room for it.`);
  if (row.tokens_came.length > 0) said.push(`Came: ${row.tokens_came.join(", ")}.`);
  if (row.tokens_went.length > 0) said.push(`Went: ${row.tokens_went.join(", ")}.`);
  if (row.typical_records.length > 0) said.push(`Typical: ${row.typical_records.join(", ")}.`);
  if (row.typical_records_before.length > 0) said.push(`Before: ${row.typical_records_before.join(", ")}.`);
  return said.join(" ");
}

function transientExpert(row) {
  const [losses, range] = [row.probe_losses, row.similarity_range].map((pair) => pair.map((value) => fixed(value, 2)));
  const found = row.probe_failed ? "which failed" : `CKA ${fixed(row.mean_similarity, 2)} (${range.join(" to ")} by head)`;
  const importance = row.mean_importance === null ? "" : `, mean importance ${fixed(row.mean_importance, 4)}`;
  return `The transient expert took the loss from ${losses.join(" to ")}, ${found}${importance}.`;
}

function entered(row) {
  if (row.previous === null) return "The stream began.";
  if (row.probe_losses !== null) return "New: it shares the experts.";
  if (row.known) return "Recognized: its own adapter is used again.";
  if (row.started_from === null) return "New: its own adapter starts from nothing.";
  return `New: its own adapter starts as a copy of regime ${row.started_from}'s.`;
}

/** Every regime with its numbers, and its controls. */
export function regimeTable(host, controls) {
  let [regimes, shifts] = [null, null];
  const origin = ({ number }) => {
    const entry = shifts?.shifts.find((shift) => shift.regime === number && shift.kind === "inputs" && !shift.known);
    if (entry === undefined) return UNKNOWN;
    return entry.started_from === null ? "nothing" : `regime ${entry.started_from}`;
  };
  const table = new Table(host, {
    label: "Regimes",
    empty: "No record was read yet.",
    columns: [
      {
        title: "Regime",
        key: (row) => `${row.name} ${row.current} ${row.frozen}`,
        cell: (row) => element("span", {}, regimeMark(row.number, regimes), stateOf(row)),
      },
      right("Records", (row) => count(row.records)),
      right("Visits", (row) => count(row.visits)),
      right("Last seen", (row) => count(row.last_record)),
      right("Live loss", (row) => fixed(row.prequential_loss)),
      right("Hold-out loss", (row) => fixed(row.history.at(-1)?.loss)),
      right("Accuracy", (row) => fixed(row.history.at(-1)?.accuracy)),
      right("Best", (row) => fixed(row.best_accuracy)),
      right("Held out", (row) => count(row.holdout_records)),
      right("Bank", (row) => String(row.slot)),
      { title: "Started from", cell: origin },
      buttons((row) => `${row.name} ${row.frozen}`, (row) => controls.ofRegime(row)),
    ],
  });
  return (state) => {
    [regimes, shifts] = [state.regimes, state.shifts];
    table.update(regimes?.regimes ?? [], (row) => row.number);
  };
}

/** Each regime on each slice of the canaries, the largest harm first. */
export function canaryTable(section, host) {
  let regimes = null;
  const table = new Table(host, {
    label: "Canaries",
    tall: true,
    empty: "",
    columns: [
      {
        title: "Regime",
        key: (row) => regimeLabel(row.number, regimes),
        cell: (row) => regimeMark(row.number, regimes),
      },
      { title: "Slice", cell: (row) => row.slice },
      right("Records", (row) => count(row.records)),
      right("Loss", (row) => fixed(row.loss)),
      right("Backbone", (row) => fixed(row.backbone_loss)),
      right("Harm", (row) => signed(row.harm)),
      right("Scored at step", (row) => count(row.step)),
      { title: "Worst records", cell: (row) => row.worst.join(", "), wide: true },
    ],
  });
  return (state) => {
    regimes = state.regimes;
    const rows = (regimes?.regimes ?? []).flatMap(({ number, canaries, canaries_step: step }) =>
      canaries.map((row) => ({ ...row, number, step, harm: row.loss - row.backbone_loss })),
    );
    section.hidden = rows.length === 0;
    table.update(rows.sort((a, b) => b.harm - a.harm), (row) => `${row.number} ${row.slice}`);
  };
}

/** Each head of each regime whose tokens choose among experts, the newest regime first. */
export function expertTable(section, host) {
  let regimes = null;
  const percents = (row) => row.shares.map((share) => `${Math.round(100 * share)} %`).join(" · ");
  const table = new Table(host, {
    label: "Experts",
    tall: true,
    empty: "",
    columns: [
      {
        title: "Regime",
        key: (row) => regimeLabel(row.regime, regimes),
        cell: (row) => regimeMark(row.regime, regimes),
      },
      right("Head", (row) => String(row.head)),
      right("Tokens to each of its experts", percents),
      right("Routing bias of each", (row) => row.bias?.map((bias) => fixed(bias, 2)).join(" · ") ?? "none"),
    ],
  });
  const note = element("p", { class: "help" });
  host.append(note);
  return (state) => {
    regimes = state.regimes;
    const serves = state.experts?.effective_regimes ?? null;
    setText(note, serves === null ? "" : `An expert serves ${fixed(serves, 2)} of ${count(state.experts.regimes.length)} regimes (N_eff).`);
    const rows = (state.experts?.regimes ?? []).toReversed().flatMap(({ regime, shares, bias }) =>
      shares.map((row, index) => ({ regime, head: index + 1, shares: row, bias: bias?.[index] })),
    );
    section.hidden = rows.length === 0;
    table.update(rows, (row) => `${row.regime} ${row.head}`);
  };
}

function stateOf({ current, frozen }) {
  return [current && " now", frozen && " frozen"].filter(Boolean).join(",");
}

const EXPLAINED = {
  regime: "the adapter of the regime that explains the request",
  adapter: "the experts of a preset that does not route by regime",
  mean: "the average of all regimes' adapters",
  backbone: "the untouched backbone, which the request named",
};
const UNEXPLAINED = {
  regime: "no regime explains it: the adapter of the nearest, or of the one that it named",
  adapter: "no regime explains it: the experts of a preset that does not route by regime",
  mean: "abstention: the average of all regimes' adapters",
  backbone: "abstention: the untouched backbone",
};

/** Requests by what answered them, and how requests that no regime explains are answered. */
export function requestTable(host) {
  const table = new Table(host, {
    label: "Requests by what answered",
    empty: "No request yet.",
    columns: [
      { title: "Answered by", cell: (row) => row.meaning, wide: true },
      right("Requests", (row) => count(row.number)),
    ],
  });
  const note = element("p", { class: "help" });
  host.append(note);
  return ({ status }) => {
    const { answered_by: all, unknown_answered_by: unexplained } = status.requests;
    const rows = Object.keys(all).flatMap((name) => [
      { meaning: EXPLAINED[name], number: all[name] - unexplained[name] },
      { meaning: UNEXPLAINED[name], number: unexplained[name] },
    ]);
    table.update(rows.filter((row) => row.number > 0), (row) => row.meaning);
    setText(note, fallback(status.unknown_requests));
  };
}

/** What answers unexplained requests now, and the evidence for it. */
function fallback({ answered_by: answeredBy, setting, ...losses }) {
  const rows = [["mean", losses.mean_loss], ["nearest regime", losses.nearest_loss], ["backbone", losses.backbone_loss]];
  const measured = rows.filter(([, loss]) => loss !== null).map(([name, loss]) => `${name} ${fixed(loss, 2)}`);
  const why = measured.length === 0 ? "" : ` Loss of new regimes' first records, before learning: ${measured.join(", ")}.`;
  return `Unexplained requests go to the ${answeredBy} now (serve.unknown: ${setting}).${why}`;
}

/** Records that could not be used: how many by reason, and the newest. */
export function deadLetterTables(host) {
  const byReason = new Table(host, {
    label: "Dead letters by reason",
    empty: "None: every record could be used.",
    columns: [{ title: "Reason", cell: (row) => words(row.reason) }, right("Records", (row) => count(row.number))],
  });
  const below = element("div");
  host.append(below);
  const newest = new Table(below, {
    label: "Newest dead letters",
    tall: true,
    empty: "",
    columns: [
      { title: "Newest", cell: (row) => clock(row.at * 1000) },
      { title: "Partition", cell: (row) => `${row.topic.slice(row.topic.lastIndexOf("/") + 1)}:${row.partition}` },
      right("Offset", (row) => count(row.offset)),
      { title: "Why", cell: (row) => row.message || words(row.reason), wide: true },
    ],
  });
  return ({ status, history }) => {
    const reasons = Object.entries(status.dead_letters).map(([reason, number]) => ({ reason, number }));
    byReason.update(reasons.filter((row) => row.number > 0), (row) => row.reason);
    newest.update([...history.dead_letters].reverse(), (row) => `${row.topic} ${row.partition} ${row.offset}`);
  };
}

/** The snapshots on disk, and their controls. */
export function snapshotTable(host, controls) {
  const table = new Table(host, {
    label: "Snapshots",
    tall: true,
    empty: "None written yet.",
    columns: [
      right("Step", (row) => count(row.step)),
      { title: "Written", cell: (row) => clock(Date.parse(row.written_at)) },
      right("Size", (row) => bytes(row.size_bytes)),
      { title: "Kept", cell: (row) => (row.pinned ? "pinned" : "until pruned") },
      buttons((row) => String(row.pinned), (row) => controls.ofSnapshot(row)),
    ],
  });
  return ({ snapshots }) => table.update(snapshots?.snapshots ?? [], (row) => row.name);
}

function heldBack({ held_back: reason, canaries }) {
  if (reason === null) return "no";
  if (reason !== "worse_on_canary") return words(reason);
  const row = canaries.reduce((worst, one) => (one.p_value < worst.p_value ? one : worst));
  return `${words(reason)}: ${row.slice} (${row.worst.join(", ")})`;
}

/** The published version of each regime, versions that were held back, and the model servers. */
export function publicationTables(section, host, controls) {
  const summary = element("p", { class: "help" });
  let regimes = null;
  host.append(summary);
  const versions = new Table(host, {
    label: "Published versions",
    empty: "No version yet: the untouched backbone answers.",
    columns: [
      {
        title: "Regime",
        key: (row) => regimeLabel(row.number, regimes),
        cell: (row) => regimeMark(row.number, regimes),
      },
      { title: "Version", cell: (row) => row.version ?? UNKNOWN },
      { title: "Held back", cell: heldBack, wide: true },
      right("Tested at step", (row) => count(row.step)),
      right("Records", (row) => count(row.records)),
      right("Loss", (row) => fixed(row.loss)),
      right("Published", (row) => fixed(row.published_loss)),
      right("Backbone", (row) => fixed(row.backbone_loss)),
      right("p", (row) => fixed(row.p_value)),
      buttons((row) => String(row.held_back), (row) => controls.ofPublication(row)),
    ],
  });
  const below = element("div");
  host.append(below);
  const replicas = new Table(below, {
    label: "Model servers",
    empty: "",
    columns: [
      { title: "Model server", cell: (row) => row.url },
      { title: "Answers", cell: (row) => (row.is_up ? "yes" : "no") },
      right("Loaded", (row) => `${row.loaded} of ${row.wanted}`),
      { title: "Fault", cell: (row) => row.fault ?? "none", wide: true },
    ],
  });
  return ({ publication, ...state }) => {
    section.hidden = !publication?.enabled;
    if (section.hidden) return;
    regimes = state.regimes;
    const at = publication.written_at === null ? "" : ` of ${clock(Date.parse(publication.written_at))}`;
    const newest = publication.sequence === null ? "Nothing is published yet." : `Publication ${publication.sequence}${at}.`;
    setText(summary, [newest, publication.fault].filter(Boolean).join(" "));
    versions.update(publication.regimes, (row) => row.number);
    replicas.update(publication.replicas, (row) => row.url);
  };
}
