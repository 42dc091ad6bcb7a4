// The adapters (LoRA) that requests to a session may name: which there are, another one, and without one.

import { ask, tellError } from "./dialogs.js";
import { $, call, h, quiet } from "./common.js";

const stateOf = ({ pinned, loaded }) => [pinned && "stays loaded", loaded && "loaded"].filter(Boolean).join(", ") || "known";
const pathOf = ({ model, name }) => `api/adapters/${encodeURIComponent(model)}/${encodeURIComponent(name)}`;

function rowOf(adapter) {
  const { name, served_as: served, rank, folder, pinned } = adapter;
  const button = (attribute, verb) => h("button", { type: "button", [attribute]: pathOf(adapter), "aria-label": `${verb}: ${name}` }, verb);
  return h("tr", {},
    h("th", { scope: "row" }, served), [`rank ${rank}`, stateOf(adapter), folder].map((cell) => h("td", {}, cell)),
    h("td", {}, h("div", { class: "row" }, button(pinned ? "data-unpin" : "data-pin", pinned ? "Let it give way" : "Keep loaded"), button("data-forget", "Remove"))));
}

/** The adapters of a session that has room for some. */
export function adaptersOf({ name, adapters, known_adapters: known }) {
  const columns = ["Adapter", "Rank", "State", "Folder", ""];
  return h("details", { class: "adapters", "data-key": "adapters" },
    h("summary", {}, `Adapters: ${known.length} known, room for ${adapters} at a time`),
    known.length > 0
      ? h("div", { class: "scroll", tabindex: "0" }, h("table", { class: "stacked" },
        h("thead", {}, h("tr", {}, columns.map((title) => h(title ? "th" : "td", title ? { scope: "col" } : {}, title)))),
        h("tbody", {}, known.map(rowOf))))
      : quiet("None is known yet."),
    h("form", { "data-add-adapter": name, class: "row" },
      h("label", {}, "Name", h("input", { name: "name", required: "", pattern: "[A-Za-z0-9_.\\-]{1,64}", autocomplete: "off", placeholder: "letters" })),
      h("label", {}, "Folder on one of its machines", h("input", { name: "folder", required: "", autocomplete: "off", placeholder: "./letters/adapter" })),
      h("button", {}, "Add adapter")));
}

/** Have the buttons do what they say; `refresh` shows what has become of it. */
export function listen(refresh) {
  $("sessions").addEventListener("click", async ({ target }) => {
    const { pin, unpin, forget } = target.dataset;
    if (!(pin ?? unpin ?? forget)) return;
    if (forget && !(await ask("Remove this adapter? What is being answered with it is answered to its end.", "Remove adapter"))) return;
    const asked = forget ? call(forget, { method: "DELETE" }) : call(`${pin ?? unpin}/pin`, { method: "POST", body: { pinned: Boolean(pin) } });
    await asked.catch(tellError);
    refresh();
  });
  $("sessions").addEventListener("submit", async (event) => {
    const model = event.target.dataset.addAdapter;
    if (!model) return;
    event.preventDefault();
    const { name, folder } = event.target.elements;
    try {
      await call("api/adapters", { method: "POST", body: { model, name: name.value, folder: folder.value.trim() } });
      event.target.reset();
    } catch (error) {
      await tellError(error);
    }
    refresh();
  });
}
