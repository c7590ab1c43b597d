/** Requests to the daemon. The token lives in this object: never in an address, a cookie or the browser's storage. */

/** An answer that is not a success, with the daemon's own words. */
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

  /** The body of an answer to GET. */
  async get(path) {
    return this.#request(path, { method: "GET" });
  }

  /** The body of an answer to POST. */
  async post(path, body = undefined) {
    const json = body === undefined ? {} : { body: JSON.stringify(body), headers: { "content-type": "application/json" } };
    return this.#request(path, { method: "POST", ...json });
  }

  async #request(path, { headers = {}, ...options }) {
    const authorized = this.#token === null ? headers : { ...headers, authorization: `Bearer ${this.#token}` };
    const answer = await fetch(path, { ...options, headers: authorized, credentials: "omit", redirect: "error" });
    const body = await answer.json();
    if (answer.ok) return body;
    const { code, message, hint } = body.error;
    throw new ApiError(answer.status, code, message, hint);
  }
}
