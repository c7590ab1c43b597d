/** Two questions: the token, and whether something is really meant. */

import { byId, setText } from "./dom.js";

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
