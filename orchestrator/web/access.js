// Who may do what, for admins: machines that want to join or belong here, API keys, join tokens.

import { ask, tellError } from "./dialogs.js";
import { $, call, get, h, joined, morphList, plural, quiet } from "./common.js";

const LISTS = ["members", "keys", "tokens", "pairings"];
const DAY_S = 86_400;

let allowed = true; // until the orchestrator says that this key may not

/** Read all of it; null: whoever looks at this page may not see it. */
export async function readAccess() {
  if (!allowed) return null;
  try {
    const told = await Promise.all(LISTS.map((each) => get(`api/${each}`)));
    return Object.assign({}, ...told);
  } catch (error) {
    if (error.status !== 403) throw error;
    allowed = false;
    return null;
  }
}

/** Begin again with another key, which may be for more. */
export const forgetAccess = () => (allowed = true);

const day = (unix) => new Date(1000 * unix).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

function validity({ expires, uses_left: uses }) {
  const hours = expires && (expires - Date.now() / 1000) / 3600;
  const until = hours === null ? "until it is removed" : hours < 1 ? "for less than an hour" : `for ${plural(Math.floor(hours), "hour")}`;
  return joined(uses === null ? "any number of machines" : plural(uses, "machine"), until);
}

/** A line: what it is, what is known of it, and a button with which it goes. */
const line = (key, name, told, attribute, verb) =>
  h("li", { "data-key": key },
    h("div", {}, h("b", { class: "name" }, name), quiet(told)),
    h("button", { type: "button", [attribute]: key, "aria-label": `${verb}: ${name}` }, verb));

/** Show what `readAccess` has read. */
export function drawAccess(access) {
  $("access").hidden = access === null;
  const wanting = (access?.pairings ?? []).filter(({ name, tries_left: left }) =>
    left > 0 && !access.members.some((member) => member.alive && member.name === name)); // who is in needs no code
  morphList($("pairings"), wanting.map(({ name, address, code }) =>
    h("li", { "data-key": `${name} ${address}`, class: "notice" },
      h("p", {}, h("b", {}, name), ` (${address}) wants to join. If that is your machine, type there:`),
      h("p", { class: "code" }, `${code.slice(0, 4)} ${code.slice(4)}`))));
  if (!access) return;
  const { members, keys, tokens } = access;
  morphList($("members"), members.map(({ name, address, alive, joined: since }) =>
    line(name, name, joined(alive ? `here, at ${address}` : "not here now", `since ${day(since)}`), "data-revoke", "Shut out")));
  morphList($("keys"), keys.map(({ id, note, scope, created }) =>
    line(id, note || id, joined(scope === "admin" ? "may do everything" : "may use models", `since ${day(created)}`), "data-remove-key", "Remove")));
  morphList($("tokens"), tokens.map((token) =>
    line(token.id, token.note || token.id, joined(validity(token), `since ${day(token.created)}`), "data-remove-token", "Remove")));
  for (const [list, none] of [["members", members], ["keys", keys], ["tokens", tokens]]) $(`no-${list}`).hidden = none.length > 0;
}

const GOES = [ // by what a button is for: its path, the question, and what is said yes to
  ["revoke", (name) => `api/members/${encodeURIComponent(name)}`, "Shut out",
    (name) => `Shut ${name} out? Its sessions go on without it, and it needs another code or token to come back.`],
  ["removeKey", (id) => `api/keys/${id}`, "Remove key", () => "Remove this key? Programs that have it are refused from now on."],
  ["removeToken", (id) => `api/tokens/${id}`, "Remove token", () => "Remove this token? Machines that have joined with it stay."],
];

/** Show a secret that has just been made, which is told this once. */
function showSecret(place, words, secret) {
  const text = h("code", { tabindex: "0" }, secret);
  place.replaceChildren(h("p", {}, words), h("pre", {}, text), quiet("It is not shown again."));
  text.focus();
}

function makes(form, path, bodyOf, show, refresh) {
  $(form).addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      show($(`${form}-made`), await (await call(path, { method: "POST", body: bodyOf(event.target.elements) })).json());
      event.target.reset();
    } catch (error) {
      await tellError(error);
    }
    refresh();
  });
}

/** Have buttons and forms do what they say; `refresh` shows what has become of it. */
export function listen(refresh) {
  $("access").addEventListener("click", async ({ target }) => {
    const [what, path, yes, question] = GOES.find(([name]) => target.dataset[name]) ?? [];
    if (!what || !(await ask(question(target.dataset[what]), yes))) return;
    await call(path(target.dataset[what]), { method: "DELETE" }).catch(tellError);
    refresh();
  });
  makes("new-key", "api/keys", ({ note, scope }) => ({ note: note.value.trim(), scope: scope.value }),
    (place, { key }) => showSecret(place, "Give this key to the program, as its API key:", key), refresh);
  makes("new-token", "api/tokens", ({ note, days, single }) => ({
    note: note.value.trim(), ...(days.value && { expires_s: Number(days.value) * DAY_S }), ...(single.checked && { uses: 1 }),
  }), (place, { token }) =>
    showSecret(place, "On the machine that is to join, with the address that the first one has printed:", `motley join HOST:PORT --token ${token}`), refresh);
}
