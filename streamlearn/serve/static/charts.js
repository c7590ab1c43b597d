/** The charts along the stream: ribbon, loss, hold-out scores, accuracy matrix, forgetting, requests, speed and lag. */

import { Chart, aligned, smoothed } from "./chart.js";
import { color, count, element, fixed, regimeClass, regimeColor, regimeDash, regimeLabel, regimeMark } from "./dom.js";

const MAX_MARKS = 60; // more would run into each other

/** The stream from its first record to its newest, as colored segments with the number of their regime. */
export function ribbon(host) {
  let drawn = "";
  return ({ history, shifts, regimes }) => {
    const { segments } = history;
    const [start, end] = [segments[0]?.first_record ?? 1, segments.at(-1)?.last_record ?? 0];
    const declared = (shifts?.shifts ?? []).filter((shift) => shift.previous !== null && shift.declared_at >= start);
    const marked = declared.slice(-MAX_MARKS);
    const shown = segments.map((segment) => [regimeLabel(segment.regime, regimes), segment.last_record]);
    const key = JSON.stringify([shown, marked.length]);
    if (key === drawn) return;
    drawn = key;
    const bars = segments.map((segment) => bar(segment, regimes));
    const marks = marked.map((shift) => mark(shift, (shift.onset - start) / Math.max(1, end - start + 1)));
    host.replaceChildren(
      element("ol", { "aria-label": "Segments of the stream, oldest first" }, ...bars),
      element("div", { class: "marks", "aria-hidden": "true" }, ...marks),
    );
  };
}

function bar({ regime, first_record: first, last_record: last, joined }, regimes) {
  const several = joined > 1 ? `, ${joined} segments together` : "";
  const text = `regime ${regimeLabel(regime, regimes)}, records ${count(first)} to ${count(last)}${several}`;
  return element(
    "li",
    { class: regimeClass(regime), title: text, style: { "flex-grow": String(last - first + 1) } },
    element("span", { "aria-hidden": "true" }, String(regime)),
    element("span", { class: "hidden" }, text),
  );
}

function mark(shift, place) {
  const title = `${shift.kind} shift at record ${count(shift.declared_at)}`;
  return element("span", { title, style: { left: `${100 * place}%` } }, shift.kind === "answers" ? "◆" : "▾");
}

const SMOOTHED_RECORDS = 16;
const BAND_ALPHA = 0.09;

/** Prequential loss compared with the untouched backbone's, over the regimes of the stream. */
export function lossChart(host) {
  let segments = [];
  const range = () => (segments.length === 0 ? null : [segments[0].first_record, segments.at(-1).last_record + 1]);
  const behind = (plot) => drawRegimes(plot, segments);
  const chart = new Chart(host, { label: "Loss along the stream", unit: "Nats per token.", digits: 3, height: 250, range, behind });
  return ({ history }) => {
    const { points } = history;
    segments = history.segments;
    const mean = (name) => smoothed(points[name], points.records, SMOOTHED_RECORDS);
    chart.update(points.record, [
      { label: "each batch", values: points.loss, color: "--accent", width: 1, faint: true },
      { label: "the model, before each update", values: mean("loss"), color: "--accent" },
      { label: "the same on a sample", values: mean("sample_loss"), color: "--regime-2", dash: [2, 3] },
      { label: "the untouched backbone on that sample", values: mean("backbone_loss"), color: "--regime-1", dash: [7, 4] },
    ]);
  };
}

function drawRegimes(plot, segments) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.globalAlpha = BAND_ALPHA;
  for (const { regime, first_record: first, last_record: last } of segments) {
    const [from, to] = [plot.valToPos(first, "x", true), plot.valToPos(last + 1, "x", true)];
    ctx.fillStyle = color(regimeColor(regime));
    ctx.fillRect(from, bbox.top, to - from, bbox.height);
  }
  ctx.restore();
}

const MAX_LINES = 12; // more cannot be told apart; those with the newest records are drawn

/** Accuracy and loss of each regime on its hold-out records. */
export function holdoutCharts(accuracyHost, lossHost) {
  const accuracy = new Chart(accuracyHost, { label: "Accuracy on hold-out by regime", digits: 3 });
  const loss = new Chart(lossHost, { label: "Loss on hold-out by regime", unit: "Nats per token.", digits: 3 });
  return ({ regimes, history }) => {
    if (regimes === null) return;
    const drawn = newest(regimes.regimes.filter((regime) => regime.history.length > 0), MAX_LINES);
    const draw = (chart, read) => {
      const series = drawn.map(({ history: scores }) => ({
        x: scores.map((score) => recordAt(score.step, history.points)),
        values: scores.map(read),
      }));
      const { x, columns } = aligned(series);
      const lines = drawn.map(({ number }, index) => ({
        label: `regime ${regimeLabel(number, regimes)}`,
        values: columns[index],
        color: regimeColor(number),
        dash: regimeDash(number),
      }));
      chart.update(x, lines);
    };
    draw(accuracy, (score) => score.accuracy);
    draw(loss, (score) => score.loss);
  };
}

/** Those with the newest records, by number. */
function newest(regimes, most) {
  const sorted = [...regimes].sort((one, other) => (other.last_record ?? 0) - (one.last_record ?? 0));
  return sorted.slice(0, most).sort((one, other) => one.number - other.number);
}

/** The record at the end of a step. */
function recordAt(step, { step: steps, record }) {
  let [low, high] = [0, steps.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return record[Math.min(low, record.length - 1)] ?? step;
}

const MAX_ROWS = 14; // the newest segments
const MAX_COLUMNS = 14; // the regimes with the newest records
const MAX_SHADE = 55; // per cent: text on it stays readable

/** The accuracy matrix. */
export function accuracyMatrix(host) {
  let drawn = "";
  return ({ history, regimes }) => {
    if (regimes === null) return;
    const columns = newest(regimes.regimes, MAX_COLUMNS);
    const ended = history.segments.filter((segment) => segment.ended && Object.keys(segment.accuracy).length > 0);
    const now = Object.fromEntries(columns.map((regime) => [regime.number, regime.history.at(-1)?.accuracy]));
    const rows = [
      ...ended.slice(-MAX_ROWS).map(({ regime, last_record: last, accuracy }) => ({ regime, title: `at record ${count(last)}`, accuracy })),
      { regime: regimes.current, title: "now", accuracy: now },
    ];
    const key = JSON.stringify([rows, columns.map((regime) => [regime.number, regime.name])]);
    if (key === drawn) return;
    drawn = key;
    const scored = Object.values(now).some((accuracy) => accuracy !== undefined);
    host.replaceChildren(
      scored ? matrix(rows, columns, regimes) : element("p", { class: "empty" }, "No hold-out record was scored yet."),
    );
  };
}

function matrix(rows, columns, regimes) {
  const titles = columns.map((regime) => element("th", { scope: "col" }, regimeMark(regime.number, regimes)));
  const body = rows.map((row) => {
    const head = element("th", { scope: "row" }, regimeMark(row.regime, regimes), ` ${row.title}`);
    return element("tr", {}, head, ...columns.map((regime) => cell(row, regime.number)));
  });
  const table = element(
    "table",
    { class: "matrix" },
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "After the segment of"), ...titles)),
    element("tbody", {}, ...body),
  );
  return element("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Accuracy matrix" }, table);
}

function cell({ regime, accuracy }, column) {
  const value = accuracy[column];
  const attributes = {
    class: column === regime ? "own" : undefined,
    style: { "--share": `${Math.round((value ?? 0) * MAX_SHADE)}%` },
  };
  return element("td", attributes, value == null ? "" : fixed(value, 2));
}

/** A chart whose lines are columns of the history: `lines` is a list of label, read, color and dash. */
function pointChart(host, options, lines) {
  const chart = new Chart(host, options);
  return ({ history: { points } }) =>
    chart.update(points.record, lines.map(([label, read, lineColor, dash = []]) => ({ label, values: read(points), color: lineColor, dash })));
}

export const forgettingChart = (host) =>
  pointChart(host, { label: "Average forgetting and backward transfer", digits: 3 }, [
    ["average forgetting (AF)", (points) => points.average_forgetting, "--regime-1"],
    ["backward transfer (BWT)", (points) => points.backward_transfer, "--regime-0", [7, 4]],
  ]);

export const requestChart = (host) =>
  pointChart(host, { label: "Requests along the stream", height: 140, digits: 0, empty: "Nothing yet: requests are drawn with the next batch." }, [
    ["requests answered so far", (points) => running(points.requests), "--accent"],
    ["abstentions so far", (points) => running(points.unexplained_requests), "--regime-1", [7, 4]],
  ]);

export const speedChart = (host) =>
  pointChart(host, { label: "Speed along the stream", unit: "Tokens per second.", height: 140, digits: 0 }, [
    ["tokens per second", (points) => points.tokens_per_s, "--regime-2"],
  ]);

export const lagChart = (host) =>
  pointChart(host, { label: "Lag along the stream", unit: "Records.", height: 140, digits: 0 }, [
    ["lag, records", (points) => points.lag, "--regime-3", [7, 4]],
  ]);

/** The sum so far; nothing before the first. */
function running(values) {
  let sum = 0;
  return values.map((value) => (sum += value) || null);
}
