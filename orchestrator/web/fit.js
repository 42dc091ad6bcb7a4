// "What fits here": which well-known models the machines could run, and how fast, by the planner's forecast.

import { $, call, get, h, plural, scaled, tell, words } from "./common.js";

const READABLE_MS = 200; // per token: what is slower than people read is of less use than a smaller model
const WAITED_MS = 120_000;
let asking = false;
let machines = ""; // that are alive, by their names
let planned = null; // machines for which what fits is told, or being planned; null: nobody knows

async function forecast({ name, quantisation }) {
  try {
    const body = { model: name, by_shape: true, experts: "sliced" };
    const response = await call("api/plan", { method: "POST", body, signal: AbortSignal.timeout(WAITED_MS) });
    const { plan: { ranks }, parameters, forecast: { ms_per_token: each } } = await response.json();
    return { name, quantisation, parameters, each, nodes: ranks.map(({ node }) => node), size: ranks.reduce((sum, rank) => sum + 1e6 * rank.memory_mb, 0) };
  } catch (error) {
    if (!error.status) throw error; // the orchestrator is away
    return { name, quantisation, why: words(error), small: error.code === "insufficient_memory" };
  }
}

/** Tokens per second, as they are shown. */
function rate(each) {
  return (1000 / each).toFixed(each > 100 ? 1 : 0);
}

/** Those that are quick enough, the largest first; slower ones, the quickest first, as far as speeds look different; those that do not fit. */
function order(one, other) {
  const rank = ({ why, each }) => (why ? 2 : rate(each) < 1000 / READABLE_MS ? 1 : 0);
  const quicker = rank(one) === 1 ? rate(other.each) - rate(one.each) : 0;
  return rank(one) - rank(other) || quicker || (other.parameters ?? 0) - (one.parameters ?? 0) || one.name.localeCompare(other.name);
}

function row({ name, quantisation, why, small, each, nodes, size }) {
  const told = small ? "does not fit" : why; // other refusals say what to do
  if (why) return h("tr", { class: "quiet" }, h("th", { scope: "row" }, name), h("td", { colspan: "4", title: why }, told));
  return h("tr", {},
    h("th", { scope: "row" }, h("button", { type: "button", "data-choose": name, title: "Put it into the form" }, name)),
    h("td", {}, `${rate(each)} tokens/s`),
    h("td", {}, scaled(size, "B")), h("td", {}, quantisation), h("td", {}, nodes.join(", ")));
}

async function look() {
  if (asking) return;
  [asking, planned] = [true, machines];
  const found = [];
  tell($("fit-told"), "Planning…");
  try {
    const { models } = await get("api/known-models");
    for (const each of models) {
      found.push(await forecast(each));
      $("fit-models").replaceChildren(...found.sort(order).map(row));
      $("fit-table").hidden = false;
      tell($("fit-told"), `Planning… ${found.length} of ${models.length}`);
    }
    const fitting = found.filter(({ why }) => !why).length;
    if (!found.some(({ why, small }) => !why || small)) tell($("fit-told"), "None of them could be planned: the table says why.");
    else tell($("fit-told"), fitting
      ? `${plural(fitting, "model")} of ${found.length} would fit: first those that answer as fast as people read, the largest before the others. These are forecasts; nothing was fetched. A model comes from huggingface.co when it is first started.`
      : "None of them fits. Another machine, or more memory offered, would help.");
  } catch (error) {
    if (!error.status) planned = null;
    tell($("fit-told"), error.status ? words(error) : `${words(error)} Planning begins again when it does.`);
  }
  asking = false;
}

/** Have it looked up again, where it is shown, for other machines, or when an orchestrator that was away answers and has some. */
export function drawFit(alive) {
  machines = alive.map(({ name }) => name).join();
  if ($("fit").open && machines && planned !== machines) look();
}

/** Have it looked up when it is opened, and a model that is chosen put into the form. */
export function listen() {
  $("fit").addEventListener("toggle", () => $("fit").open && look());
  $("fit-models").addEventListener("click", ({ target }) => {
    if (!target.dataset.choose) return;
    $("new").open = true;
    const { model } = $("create").elements;
    model.value = target.dataset.choose;
    model.focus();
  });
}
