/** The series along the stream, as /v1/history gives them: all of them once, then what changed. */

const KEPT_ROWS = 32; // dead letters and snapshots, as the daemon keeps them
const MAX_POINTS = 4000; // twice what the daemon keeps: then all is asked for again, thinned

export class History {
  points = {};
  segments = [];
  deadLetters = [];
  snapshots = [];
  #cursor = null;

  get length() {
    return this.points.record?.length ?? 0;
  }

  /** What to ask for next. */
  get path() {
    const whole = this.#cursor === null || this.length > MAX_POINTS;
    return whole ? "/v1/history" : `/v1/history?since=${encodeURIComponent(this.#cursor)}`;
  }

  /** Take an answer in. */
  merge(answer) {
    this.#cursor = answer.cursor;
    if (answer.complete) Object.assign(this, { points: {}, segments: [], deadLetters: [], snapshots: [] });
    this.#mergePoints(answer.points);
    this.segments = mergedSegments(this.segments, answer.segments);
    this.deadLetters = [...this.deadLetters, ...answer.dead_letters].slice(-KEPT_ROWS);
    this.snapshots = [...this.snapshots, ...answer.snapshots].slice(-KEPT_ROWS);
  }

  #mergePoints(added) {
    if (added.step.length === 0 && this.length > 0) return;
    const before = added.step[0] - added.batches[0]; // the last step that no added point stands for
    const kept = (this.points.step ?? []).filter((step) => step <= before).length;
    const names = Object.keys(added);
    this.points = Object.fromEntries(
      names.map((name) => [name, [...(this.points[name] ?? []).slice(0, kept), ...added[name]]]),
    );
  }
}

/** The rows of the client that lie entirely before the first new one, and the new ones. */
function mergedSegments(known, added) {
  return added.length === 0 ? known : [...known.filter((each) => each.last_record < added[0].first_record), ...added];
}
