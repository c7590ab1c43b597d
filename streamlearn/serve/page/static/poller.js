/** Asks the daemon for what changed, once a second while the page is visible, and hands the state to the views. */

import { History } from "./history.js";

const PERIOD_MS = 1000; // a shift is on the page within two of them
const REGIMES_EVERY = 2; // turns; their scores change every few batches
const PUBLICATION_EVERY = 5;

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
    const publishes = state.publication?.enabled !== false;
    await Promise.all([
      this.#api.get(state.history.path).then((answer) => state.history.merge(answer)),
      this.#askIfNew("shifts", shifts),
      this.#askIfNew("regimes", `${shifts} ${Math.floor(this.#turn / REGIMES_EVERY)}`),
      this.#askIfNew("snapshots", status.last_snapshot?.name),
      this.#askIfNew("publication", publishes && Math.floor(this.#turn / PUBLICATION_EVERY)),
    ]);
  }

  /** Ask for an endpoint unless it was asked for with this sign of its state already. */
  async #askIfNew(name, sign) {
    if (name in this.#signs && this.#signs[name] === sign) return;
    this.state[name] = await this.#api.get(`/v1/${name}`);
    this.#signs[name] = sign;
  }
}
