// Trainings on the mesh, each as a card: its nodes, each with the curve of its losses, its speed and memory.

import { ask, tellError } from "./dialogs.js";
import { $, badge, call, colour, h, joined, morphList, plural, quiet, scaled, svg, swatch } from "./common.js";

const MODES = { merge: "each machine trains alone, then adapters are merged", chain: "each machine has some layers" };
const SHOWN = 5; // those that run, and then the latest ones

/** A node's losses, from 0 up to the largest, over the steps. */
function curve(node, points, steps) {
  const losses = points.filter(({ loss }) => loss != null);
  if (losses.length < 2) return null;
  const top = Math.max(...losses.map(({ loss }) => loss));
  const line = losses.map(({ step, loss }) => `${((1000 * step) / steps).toFixed(1)},${(100 - (90 * loss) / top).toFixed(1)}`);
  const label = `Loss on ${node}: ${losses[0].loss.toFixed(3)} at step ${losses[0].step}, ${losses.at(-1).loss.toFixed(3)} at step ${losses.at(-1).step}`;
  return h("figure", { class: "plot" },
    svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": label },
      svg("polyline", { points: line.join(" ") })));
}

function memberRow({ node, state, why, latest, memory_bytes: given, curve: points }) {
  const losses = points.filter(({ loss }) => loss != null);
  return h("li", {},
    h("div", {}, h("p", {}, swatch(node), h("b", {}, node)), quiet(joined(state, why))),
    latest && h("div", {},
      h("p", {}, `step ${latest.step} of ${latest.steps}`),
      quiet(joined(losses.length > 0 && `loss ${losses.at(-1).loss.toFixed(3)}`, latest.tokens_per_s > 0 && scaled(latest.tokens_per_s, "tokens/s"))),
      h("progress", { class: colour(node), value: latest.step, max: latest.steps, "aria-label": `${node}: steps done` }),
      quiet(`${scaled(latest.peak_bytes, "B")} of memory used at most, ${scaled(given, "B")} given`)),
    latest && curve(node, points, latest.steps));
}

function whoHasData({ owner, others = [] }) {
  return others.length ? `${[owner, ...others].join(", ")} have data of their own` : `${owner} has the data`;
}

function jobCard(job) {
  const { result, members } = job;
  const trainers = members.filter(({ leads, latest }) => !leads || latest);
  return h("article", { class: `panel ${job.state}`, "data-key": job.id },
    h("div", { class: "row" },
      h("h3", {}, job.name), badge(job.state),
      job.state === "running" && h("button", { type: "button", "data-stop": job.id }, "Stop")),
    quiet(joined(job.model, MODES[job.mode], whoHasData(job))),
    job.why && h("p", { class: "failure" }, job.why),
    result?.perplexity && h("p", {}, `Perplexity of ${plural(result.held_out, "held-out example")}: ${result.perplexity[0].toFixed(2)} to ${result.perplexity[1].toFixed(2)}`),
    job.served_as && h("p", {}, "Served as ", h("b", {}, job.served_as)),
    h("ul", { class: "ranks" }, trainers.map(memberRow)));
}

export function drawJobs(jobs) {
  $("jobs-part").hidden = !jobs.length;
  const latest = [...jobs].reverse();
  const shown = [...latest.filter(({ state }) => state === "running"), ...latest.filter(({ state }) => state !== "running")];
  morphList($("jobs"), shown.slice(0, SHOWN).map(jobCard));
}

/** Have the buttons of jobs do what they say; `refresh` shows what has become of it. */
export function listen(refresh) {
  $("jobs").addEventListener("click", async ({ target }) => {
    const { stop } = target.dataset;
    if (!stop || !(await ask("Stop this training? What its machines have learnt so far is removed there.", "Stop training"))) return;
    await call(`api/jobs/${stop}`, { method: "DELETE" }).catch(tellError);
    refresh();
  });
}
