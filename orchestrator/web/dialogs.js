// Questions and bad news, in the page's own dialogs.

import { $, tell, words } from "./common.js";

/** Ask for a yes; the promise is of whether it was said. */
export function ask(question, yes) {
  const dialog = $("confirm");
  tell($("confirm-text"), question);
  $("confirm-yes").textContent = yes;
  $("confirm-no").hidden = false;
  return opened(dialog);
}

/** Say what went wrong. */
export function tellError(error) {
  tell($("confirm-text"), words(error));
  $("confirm-yes").textContent = "All right";
  $("confirm-no").hidden = true;
  return opened($("confirm"));
}

function opened(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((answered) => {
    dialog.addEventListener("close", () => answered(dialog.returnValue === "yes"), { once: true });
  });
}
