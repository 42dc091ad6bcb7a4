// The form for a new session, with every option that there is, and the forecast of what it would be.

import { $, call, colour, get, h, joined, ms, percent, quiet, tell, words } from "./common.js";
import { OPTIONS } from "./options.js";
import { TIMES } from "./steps.js";
import { speedBars } from "./whatif.js";

const WAITED_MS = 120_000;
const form = $("create");

/** An option as a field with its label. */
function field({ name, label, hint, kind, choices, wide, on, ...attributes }) {
  const id = `option-${name}`;
  const about = { id, name, ...(hint && { "aria-describedby": `${id}-hint` }) };
  if (kind === "switch") {
    return h("label", { class: "switch" }, h("input", { ...about, type: "checkbox", ...(on && { checked: "" }) }), label);
  }
  const typed = kind === "number" ? { type: "number", step: 1 } : { autocomplete: "off", spellcheck: "false" };
  return h("div", { class: wide ? "field wide" : "field" },
    h("label", { for: id }, label),
    choices
      ? h("select", about, choices.map((each) => h("option", { value: each }, each || "no")))
      : h("input", { ...about, ...typed, ...attributes }),
    hint && h("span", { id: `${id}-hint`, class: "hint" }, hint));
}

const read = {
  text: (value) => value.trim(),
  number: Number,
  numbers: (value) => value.trim().split(/[\s,;]+/).map(Number),
  stages: (value) => (value.includes("+") ? value.split("+").map(Number) : Number(value)),
  list: (value) => value.split(",").map((each) => each.trim()),
  map: (value) => Object.fromEntries(value.split(",").map((each) => each.split("=").map((part) => part.trim()))),
};

/** What the form asks for; what it leaves open is left out. */
function body() {
  const asked = {};
  for (const { name, kind, choices, on } of OPTIONS) {
    const input = form.elements[name];
    if (kind === "switch") {
      if (input.checked !== Boolean(on)) asked[name] = input.checked;
    } else if (choices ? input.value !== choices[0] : input.value.trim()) {
      asked[name] = (choices && kind !== "number" ? read.text : read[kind])(input.value);
    }
  }
  return asked;
}

for (const [place, more] of [["fields", false], ["more-fields", true]]) {
  $(place).append(...OPTIONS.filter((each) => Boolean(each.more) === more).map(({ more: _, ...each }) => field(each)));
}

/** In which order shares are, as the machines that are there are. */
export function drawOrder(alive) {
  const order = alive.map((node) => node.name).join(", ");
  const hint = form.elements.shares.nextElementSibling;
  const text = order ? `How much each machine gets, such as 3, 2, 1, in this order: ${order}` : "How much each machine gets, such as 3, 2, 1";
  if (hint.textContent !== text) hint.textContent = text;
}

function planned({ plan, forecast, alternatives, without, no_part: idle }) {
  const all = plan.ranks.reduce((sum, { memory_mb: size }) => sum + size, 0);
  const taking = new Set(plan.ranks.map(({ node }) => node));
  const parts = Object.entries(TIMES).map(([name, text]) => `${text} ${ms(forecast[`${name}_ms`])}`).join(", ");
  const other = alternatives.find(({ nodes }) => nodes.length !== plan.ranks.length) ?? alternatives[0];
  const rows = [
    ["This plan", forecast.ms_per_token, plan.ranks.map(({ node }) => node).join(", ")],
    ...(other ? [["Next best", other.ms_per_token, other.nodes.join(", ")]] : []),
    ...without.filter(({ node, ms_per_token: each }) => taking.has(node) && each !== null)
      .map(({ node, ms_per_token: each }) => [`Without ${node}`, each]),
  ];
  const needed = without.filter(({ node, ms_per_token: each }) => taking.has(node) && each === null).map(({ node }) => node);
  return [
    h("div", { class: "bar cut", role: "img", "aria-label": plan.ranks.map(({ node, memory_mb: size }) => `${node}: ${size} MB`).join(", ") },
      plan.ranks.map(({ node, memory_mb: size }) =>
        h("span", { class: colour(node), grow: size / all }, `${node} · ${percent(size / all)}`))),
    quiet(joined(`of ${all.toFixed(0)} MB of memory`, `a token: ${parts} ms`, `the first one after ${(forecast.ttft_ms / 1000).toFixed(1)} s`)),
    speedBars(rows),
    ...idle.map(({ node, why }) => quiet(`${node} takes no part: ${why}.`)),
    needed.length > 0 && quiet(`The model does not fit without ${needed.join(", nor without ")}.`),
  ].filter(Boolean);
}

async function working(button, text, work) {
  const before = button.textContent;
  tell($("create-error"), "");
  [button.disabled, button.textContent] = [true, text];
  try {
    await work();
  } catch (error) {
    $("planned").replaceChildren();
    tell($("create-error"), `Not possible: ${words(error)}`);
  }
  [button.disabled, button.textContent] = [false, before];
}

/** Offer the well-known models where a model is typed. */
async function suggest() {
  const { models } = await get("api/known-models").catch(() => ({ models: [] }));
  $("known-models").replaceChildren(...models.map(({ name }) => h("option", { value: name })));
}

/** Have the form make sessions; `refresh` shows them. */
export function listen(refresh) {
  form.elements.model.addEventListener("focus", suggest, { once: true });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    await working($("start"), "Planning…", async () => {
      await call("api/sessions", { method: "POST", body: body() });
      $("planned").replaceChildren();
      $("new").open = false;
    });
    refresh();
  });
  $("forecast").addEventListener("click", () => {
    if (!form.reportValidity()) return;
    working($("forecast"), "Planning…", async () => {
      const response = await call("api/plan", { method: "POST", body: body(), signal: AbortSignal.timeout(WAITED_MS) });
      $("planned").replaceChildren(...planned(await response.json()));
    });
  });
}
