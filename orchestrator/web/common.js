// What the parts of the page share: elements, numbers, calls to the API.

export const $ = (id) => document.getElementById(id);

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "grow") element.style.flexGrow = value; // the policy forbids style attributes, not the style object
    else if (value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(3).filter((child) => child != null && child !== false));
  return element;
}

/** A new element. Strings among its children become text, whatever they say; null and false are left out. */
export const h = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** Make `old` like `fresh`, touching only what differs, so that focus, selection and scrolling survive. */
export function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType !== Node.ELEMENT_NODE || old.nodeName !== fresh.nodeName) return void old.replaceWith(fresh);
  const own = old.nodeName === "DETAILS" ? ["open"] : []; // what is open, the person decides
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !own.includes(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (name !== "style") old.setAttribute(name, value);
  old.style.cssText = fresh.style.cssText;
  const want = [...fresh.childNodes];
  want.forEach((child, index) => {
    const key = child.dataset?.key; // what has one is found again wherever it has come to stand
    const same = key && [...old.children].find((each) => each.dataset.key === key);
    if (same && same !== old.childNodes[index]) old.insertBefore(same, old.childNodes[index] ?? null);
    const there = old.childNodes[index];
    if (there && there.dataset?.key === key) morph(there, child);
    else old.insertBefore(child, there ?? null);
  });
  [...old.childNodes].slice(want.length).forEach((child) => child.remove());
}

/** The same for a list whose items carry a `data-key`. */
export function morphList(list, items) {
  const wanted = new Set(items.map((item) => item.dataset.key));
  for (const child of [...list.children]) if (!wanted.has(child.dataset.key)) child.remove();
  const old = new Map([...list.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const same = old.get(item.dataset.key);
    if (same) morph(same, item);
    const there = list.children[index];
    if (there !== (same ?? item)) list.insertBefore(same ?? item, there ?? null);
  });
}

export const badge = (state) => h("span", { class: `badge ${state}` }, state);
export const quiet = (...text) => h("p", { class: "quiet" }, ...text);
export const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

const colours = new Map(); // by node's name, also of those that were there earlier

export const learnColours = (nodes) => nodes.forEach(({ name, colour }) => colours.set(name, colour));

/** The class of a node's colour, or of grey where the node is forgotten; a group of nodes has that of its first. */
export const colour = (node) => `c${colours.get(node.split("+")[0]) ?? "-forgotten"}`;

export const swatch = (node) => h("span", { class: `swatch ${colour(node)}` });

/** Show a message in an element, or hide it if there is none. */
export function tell(element, message) {
  element.hidden = !message;
  if (element.textContent !== message) element.textContent = message;
}

export const joined = (...parts) => parts.filter(Boolean).join(" · ");
export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
export const percent = (fraction) => `${(100 * fraction).toFixed(1)} %`;
export const ms = (value) => value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0);

/** How long ago: seconds in the largest unit that fits. */
export function ago(seconds) {
  const [size, unit] = [[3600, "h"], [60, "min"], [1, "s"]].find(([size]) => seconds >= size) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit} ago`;
}

/** Three digits in decimal units: 1 GB is 1e9 bytes, and what rounds to 1000 MB too. */
export function scaled(value, unit) {
  const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
  const [size, prefix] = units.find(([size]) => value >= 0.9995 * size) ?? [1, ""];
  return `${Number((value / size).toPrecision(3))} ${prefix}${unit}`;
}

const KEY = "motley-api-key";
export const apiKey = {
  get: () => sessionStorage.getItem(KEY),
  set: (key) => sessionStorage.setItem(KEY, key),
  forget: () => sessionStorage.removeItem(KEY),
};

/** The orchestrator's answer is an error; `status` is that of HTTP, `code` its own short form. */
export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** What a person is told: the orchestrator's own words, if it has said any. */
export const words = (error) => (error instanceof ApiError ? error.message : "The orchestrator does not answer.");

/** The response of a call; throws ApiError if the orchestrator says no, another error if it says nothing. */
export async function call(path, { method = "GET", body, signal, headers: more } = {}) {
  const key = apiKey.get();
  const headers = { ...more, ...(key && { Authorization: `Bearer ${key}` }), ...(body && { "Content-Type": "application/json" }) };
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new ApiError(said?.error?.message ?? `HTTP status ${response.status}`, response.status, said?.error?.code);
}

const [SOON_MS, LATER_MS] = [1000, 5000];

/** How long to wait, in ms, before an orchestrator is asked again that has not answered after waiting so long. */
export const later = (waited) => Math.min(Math.max(2 * waited, SOON_MS), LATER_MS);

const ANSWER_MS = 5000;

/** What the orchestrator tells at a path; throws as `call`, and where it takes too long. */
export const get = async (path) => (await call(path, { signal: AbortSignal.timeout(ANSWER_MS) })).json();
