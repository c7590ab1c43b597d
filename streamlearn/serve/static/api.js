/** Requests to the daemon. The token lives in this object: never in an address, a cookie or the browser's storage. */

/** A response that is not a success, with the daemon's own words. */
export class ApiError extends Error {
  constructor(status, code, message, hint) {
    super(hint ? `${message}; ${hint}` : message);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  #token = null;

  get hasToken() {
    return this.#token !== null;
  }

  /** Keep the token for this tab; null forgets it. */
  useToken(token) {
    this.#token = token;
  }

  /** The body of a response to GET. */
  async get(path) {
    return this.#request(path, { method: "GET" });
  }

  /** The body of a response to POST. */
  async post(path, body = undefined) {
    const json = body === undefined ? {} : { body: JSON.stringify(body), headers: { "content-type": "application/json" } };
    return this.#request(path, { method: "POST", ...json });
  }

  async #request(path, { headers = {}, ...options }) {
    const authorized = this.#token === null ? headers : { ...headers, authorization: `Bearer ${this.#token}` };
    const response = await fetch(path, { ...options, headers: authorized, credentials: "omit", redirect: "error" });
    const body = await response.json();
    if (response.ok) return body;
    const { code, message, hint } = body.error;
    throw new ApiError(response.status, code, message, hint);
  }
}

const PERIOD_MS = 1000; // a shift is on the page within two of them
const EVERY = { history: 4, regimes: 4, publication: 5, snapshots: 5, experts: 10 }; // turns

/** Requests the status once a second while the page is visible, and the rest when it may have changed. */
export class Poller {
  /** What is known; each part is the body of the endpoint of its name. */
  state = { status: null, history: null, regimes: null, shifts: null, publication: null, snapshots: null, experts: null };
  #api;
  #onState;
  #onProblem;
  #turn = 0;
  #timer = null;
  #busy = false;
  #keys = {};

  constructor(api, onState, onProblem) {
    this.#api = api;
    this.#onState = onState;
    this.#onProblem = onProblem;
    document.addEventListener("visibilitychange", () => this.refresh());
  }

  /** Request now, and then periodically. */
  async refresh() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#busy) return;
    this.#busy = true;
    const started = performance.now();
    try {
      await this.#request();
      this.#onState(this.state);
    } catch (error) {
      this.#keys = {};
      this.#onProblem(error);
    }
    this.#busy = false;
    this.#turn += 1;
    this.#timer = setTimeout(() => this.refresh(), Math.max(100, PERIOD_MS - (performance.now() - started)));
  }

  /** Request everything now, because a control may have changed it. */
  async refreshAll() {
    this.#keys = {};
    await this.refresh();
  }

  async #request() {
    const status = (this.state.status = await this.#api.get("/v1/status"));
    const shifts = `${status.num_regimes} ${JSON.stringify(status.num_shifts)}`;
    const turn = (name) => Math.floor(this.#turn / EVERY[name]);
    const publishes = this.state.publication?.enabled !== false;
    await Promise.all([
      this.#requestIfNew("history", `${shifts} ${turn("history")}`),
      this.#requestIfNew("shifts", shifts),
      this.#requestIfNew("regimes", `${shifts} ${turn("regimes")}`),
      this.#requestIfNew("snapshots", `${status.last_snapshot?.name} ${turn("snapshots")}`),
      this.#requestIfNew("experts", `${shifts} ${turn("experts")}`),
      this.#requestIfNew("publication", publishes && turn("publication")),
    ]);
  }

  /** Request an endpoint unless it was requested with this key of its state already. */
  async #requestIfNew(name, key) {
    if (name in this.#keys && this.#keys[name] === key) return;
    this.state[name] = await this.#api.get(`/v1/${name}`);
    this.#keys[name] = key;
  }
}
