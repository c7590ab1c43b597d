/** Asks the daemon for its status once a second while the page is visible, and for the rest when it may have changed. */

import { History } from "./history.js";

const PERIOD_MS = 1000; // a shift is on the page within two of them
const SERIES_EVERY = 2; // turns
const REGIMES_EVERY = 4; // their scores change every few batches
const PUBLICATION_EVERY = 5;
const SNAPSHOTS_EVERY = 5; // a command may pin one while none is written

export class Poller {
  /** What is known; each part is the body of the endpoint of its name. */
  state = { status: null, history: new History(), regimes: null, shifts: null, publication: null, snapshots: null };
  #api;
  #onState;
  #onProblem;
  #turn = 0;
  #timer = null;
  #asking = false;
  #signs = {};

  constructor(api, onState, onProblem) {
    this.#api = api;
    this.#onState = onState;
    this.#onProblem = onProblem;
    document.addEventListener("visibilitychange", () => this.refresh());
  }

  /** Ask now, and then periodically. */
  async refresh() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#asking) return;
    this.#asking = true;
    const started = performance.now();
    try {
      await this.#ask();
      this.#onState(this.state);
    } catch (error) {
      this.#signs = {};
      this.#onProblem(error);
    }
    this.#asking = false;
    this.#turn += 1;
    this.#timer = setTimeout(() => this.refresh(), Math.max(100, PERIOD_MS - (performance.now() - started)));
  }

  /** Ask for everything now, because a control may have changed it. */
  async refreshAll() {
    this.#signs = {};
    await this.refresh();
  }

  async #ask() {
    const { state } = this;
    const status = (state.status = await this.#api.get("/v1/status"));
    const shifts = `${status.num_regimes} ${JSON.stringify(status.num_shifts)}`;
    const every = (turns) => Math.floor(this.#turn / turns);
    const publishes = state.publication?.enabled !== false;
    await Promise.all([
      this.#askIfNew("history", `${shifts} ${every(SERIES_EVERY)}`, state.history.path, (answer) => state.history.merge(answer)),
      this.#askIfNew("shifts", shifts),
      this.#askIfNew("regimes", `${shifts} ${every(REGIMES_EVERY)}`),
      this.#askIfNew("snapshots", `${status.last_snapshot?.name} ${every(SNAPSHOTS_EVERY)}`),
      this.#askIfNew("publication", publishes && every(PUBLICATION_EVERY)),
    ]);
  }

  /** Ask for an endpoint unless it was asked for with this sign of its state already. */
  async #askIfNew(name, sign, path = `/v1/${name}`, take = (answer) => (this.state[name] = answer)) {
    if (name in this.#signs && this.#signs[name] === sign) return;
    take(await this.#api.get(path));
    this.#signs[name] = sign;
  }
}
