/** What a person may change, and the dialogs for it. A control asks for the token if it is unknown, and for consent if it cannot be undone. */

import { ApiError } from "./api.js";
import { byId, count, element, regimeLabel, setText } from "./dom.js";

export class Controls {
  #api;
  #say;
  #onDone;
  #token;
  #pause;

  /**
   * @param {(text: string, bad?: boolean) => void} say Shows a sentence to the person.
   * @param {() => void} onDone Called after a control, which may have changed everything.
   */
  constructor(host, api, say, onDone) {
    this.#api = api;
    this.#say = say;
    this.#onDone = onDone;
    this.#pause = this.#button("Pause", () => this.#togglePause());
    this.#token = this.#button("Enter token", () => this.#changeToken());
    host.append(this.#pause, this.#button("Write snapshot", () => this.#writeSnapshot()), this.#token);
  }

  /** Offer what the state allows. */
  update({ status }) {
    setText(this.#pause, status.phase === "paused" ? "Resume" : "Pause");
    setText(this.#token, this.#api.hasToken ? "Forget token" : "Enter token");
  }

  /** The controls of a regime. */
  ofRegime(regime) {
    const path = `/v1/regimes/${regime.number}`;
    const name = `regime ${regimeLabel(regime.number, { regimes: [regime] })}`;
    const freeze = regime.frozen ? "unfreeze" : "freeze";
    return [
      this.#button("Rename", () => this.#rename(regime, path), name),
      this.#button(freeze === "freeze" ? "Freeze" : "Unfreeze", () => this.#run(`${path}/${freeze}`), name),
      this.#button("Drop", () => this.#drop(path, name), name),
    ];
  }

  /** The controls of a snapshot. */
  ofSnapshot(snapshot) {
    const path = `/v1/snapshots/${encodeURIComponent(snapshot.name)}`;
    const name = `snapshot of step ${count(snapshot.step)}`;
    const pin = snapshot.pinned ? "unpin" : "pin";
    return [
      this.#button(pin === "pin" ? "Pin" : "Unpin", () => this.#run(`${path}/${pin}`), name),
      this.#button("Roll back", () => this.#rollBack(path, name), name),
    ];
  }

  /** The controls of a published regime. */
  ofPublication(row) {
    if (row.held_back !== "answers_changed") return [];
    const approve = () => this.#run(`/v1/regimes/${row.number}/approve`);
    return [this.#button("Approve", approve, `regime ${row.number}`)];
  }

  /** A button; `of` tells those who do not see its row what it belongs to. */
  #button(text, onclick, of = "") {
    return element("button", { type: "button", onclick, "aria-label": of ? `${text} ${of}` : undefined }, text);
  }

  async #togglePause() {
    if (this.#pause.textContent === "Resume") return this.#run("/v1/resume");
    const text = "No record is read and no step taken until it is resumed, also after a restart.";
    return (await confirmed({ title: "Pause the daemon?", text, verb: "Pause" })) !== null && this.#run("/v1/pause");
  }

  #writeSnapshot() {
    return this.#run("/v1/snapshots");
  }

  async #rename(regime, path) {
    const input = { label: "Name, at most 64 characters", value: regime.name };
    const text = "A name is for people. It changes nothing that is learned.";
    const name = await confirmed({ title: `Rename regime ${regime.number}`, text, verb: "Rename", input });
    if (name !== null) await this.#run(`${path}/rename`, { name });
  }

  async #drop(path, name) {
    const text = "Its adapter and its hold-out records are deleted. Only a rollback to an older snapshot brings them back.";
    if ((await confirmed({ title: `Drop ${name}?`, text, verb: "Drop" })) !== null) await this.#run(`${path}/drop`);
  }

  async #rollBack(path, name) {
    const text = "The daemon continues from there and reads the records after it again. Newer snapshots are moved aside.";
    const input = { label: "Records to leave out (optional), as TOPIC:PARTITION:FROM..TO, separated by spaces", value: "" };
    const skipped = await confirmed({ title: `Roll back to the ${name}?`, text, verb: "Roll back", input });
    if (skipped === null) return;
    await this.#run(`${path}/rollback`, { skip_records: skipped.split(/\s+/).filter(Boolean) });
  }

  async #changeToken() {
    this.#api.useToken(this.#api.hasToken ? null : await askForToken());
    this.#onDone();
  }

  /** Carry out a control, ask for the token as often as it is wrong, and say what became of it. */
  async #run(path, body = undefined) {
    let problem = "";
    for (;;) {
      if (!this.#api.hasToken) {
        const token = await askForToken(problem);
        if (token === null) return;
        this.#api.useToken(token);
      }
      try {
        const done = await this.#api.post(path, body);
        const changed = done.changed === false ? "nothing to change" : "done";
        this.#say(`${done.control ?? `snapshot ${done.name}`}: ${changed}.`);
        break;
      } catch (error) {
        if (!(error instanceof ApiError && error.code === "no_token")) {
          this.#say(error.message, true);
          break;
        }
        this.#api.useToken(null);
        problem = "The daemon does not accept this token.";
      }
    }
    this.#onDone();
  }
}

/** Ask for the token; null if the person cancels. */
export async function askForToken(problem = "") {
  const [dialog, field] = [byId("token-dialog"), byId("token-field")];
  setText(byId("token-error"), problem);
  field.value = "";
  const agreed = await answered(dialog, byId("token-form"), byId("token-cancel"));
  const token = field.value.trim();
  field.value = "";
  return agreed && token ? token : null;
}

/**
 * Ask whether something is meant; null if not, and otherwise what was entered.
 *
 * @param {{title: string, text: string, verb: string, input?: {label: string, value: string}}} question
 */
export async function confirmed({ title, text, verb, input }) {
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-yes"), verb);
  const field = byId("confirm-field");
  byId("confirm-input").hidden = input === undefined;
  setText(byId("confirm-label"), input?.label ?? "");
  field.value = input?.value ?? "";
  const agreed = await answered(byId("confirm-dialog"), byId("confirm-form"), byId("confirm-no"));
  return agreed ? field.value.trim() : null;
}

/** Open a dialog; whether its form was submitted. The browser returns the focus to where it was. */
function answered(dialog, form, cancel) {
  return new Promise((resolve) => {
    let agreed = false;
    form.onsubmit = (event) => {
      event.preventDefault();
      agreed = true;
      dialog.close();
    };
    cancel.onclick = () => dialog.close();
    dialog.onclose = () => resolve(agreed);
    dialog.showModal();
  });
}

const SHOWN_MS = 8000;

export class Notice {
  #host;
  #problem = "";
  #timer = null;

  constructor(host) {
    this.#host = host;
  }

  /** Show a sentence for a while. */
  say(text, bad = false) {
    clearTimeout(this.#timer);
    this.#show(text, bad);
    this.#timer = setTimeout(() => this.#show(this.#problem, true), SHOWN_MS);
  }

  /** Show a sentence until there is another one; an empty one when all is well. */
  problem(text) {
    const changed = text !== this.#problem;
    this.#problem = text;
    if (changed) this.#show(text, true);
  }

  #show(text, bad) {
    this.#host.hidden = text === "";
    this.#host.classList.toggle("bad", bad);
    setText(this.#host, text);
  }
}
