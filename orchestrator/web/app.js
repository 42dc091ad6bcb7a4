// The mesh and its sessions, drawn from the HTTP API every second.

import { drawModels } from "./chat.js";
import { expertMap, hostRow, rebalance, waiting } from "./experts.js";
import {
  $, ago, ApiError, apiKey, call, colour, h, joined, learnColours, morphList, ms, percent, plural, scaled, svg, tell, words,
} from "./common.js";

const POLL_MS = 1000;
const ANSWER_MS = 5000;
const SILENT_S = 2.5;
const PLOTTED_STEPS = 400;
const ON_THE_WAY = {
  planning: "Reading the model's description and deciding who gets what…",
  starting: "Starting a worker for each rank…",
  connecting: "The ranks connect to each other…",
  loading: "Reading weights…",
  recovering: "Deciding who gets what now…",
  paused: "Waiting until a plan fits…",
  closing: "Releasing the ranks…",
};

const get = async (path) => (await call(path, { signal: AbortSignal.timeout(ANSWER_MS) })).json();
const badge = (state) => h("span", { class: `badge ${state}` }, state);
const quiet = (...text) => h("p", { class: "quiet" }, ...text);

// ---------------------------------------------------------------- the mesh

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

function memoryBar(node) {
  const [reserved, offered] = [node.memory_reserved_bytes, node.memory_bytes];
  const onGpu = node.gpu_budget_bytes && `at most ${scaled(node.gpu_budget_bytes, "B")} of its GPU`;
  const label = joined(`${scaled(reserved, "B")} of ${scaled(offered, "B")} reserved`, onGpu);
  const bar = h("span", { class: colour(node.name), grow: reserved / offered || 0 });
  return [h("div", { class: "bar", role: "img", "aria-label": label }, bar), quiet(label)];
}

const swatch = (node) => h("span", { class: `swatch ${colour(node.name)}` });

/** A node that has left: one line, and nothing to worry about. */
const leftLine = (node) =>
  h("li", { class: "quiet", "data-key": node.name }, swatch(node), `${node.name} left ${ago(node.gone_s)}`);

function lostCard(node) {
  return h(
    "li",
    { class: "panel node lost", "data-key": node.name },
    h("div", { class: "row" }, h("h3", { class: "name" }, swatch(node), node.name), badge("lost")),
    h("p", { class: "failure" }, `Lost ${ago(node.gone_s)}: ${node.lost}.`));
}

function nodeCard(node) {
  const ranks = node.ranks.map(({ rank, model }) => `rank ${rank} of ${model}`);
  const workers = [...ranks, ...node.expert_hosts.map(({ model }) => `experts of ${model}`)];
  const gpus = node.gpus.map((gpu) =>
    joined(gpu.name, gpu.kind, scaled(gpu.memory_bytes, "B"), gpu.multiprocessors && plural(gpu.multiprocessors, "SM")));
  const reached = node.links.filter((link) => !link.failure);
  const onGpu = node.engines.filter((engine) => engine.on_gpu && !engine.lacking).map((engine) => engine.name);
  return h(
    "li",
    { class: "panel node", "data-key": node.name },
    h("div", { class: "row" },
      h("h3", { class: "name" }, swatch(node), node.name),
      badge(node.silence_s > SILENT_S ? "silent" : node.state)),
    memoryBar(node),
    h("dl", {},
      fact("CPU", joined(node.cpu, plural(node.cores, "core"))),
      fact("GPU", joined(gpus.join("; ") || "none", gpus.length && onGpu.length && `for ${onGpu.join(", ")}`)),
      fact("Bandwidth", `${scaled(node.memory_bandwidth, "B/s")} measured`),
      node.speeds.length > 0 && fact("Computes", node.speeds.map((own) => `${own.format} ${scaled(own.bytes_per_s, "B/s")}`).join(", ")),
      reached.length > 0 && fact("Links", reached.map((link) => `${link.to} ${link.latency_ms.toFixed(2)} ms, ${scaled(link.bandwidth, "B/s")}`).join("; ")),
      fact("Serves", workers.join("; ") || "nothing")),
    node.aside_s !== null && h("p", { class: "waiting" }, `Comes and goes: it is set aside for ${Math.ceil(node.aside_s / 60)} min more.`),
    node.lease.words !== null && h("p", { class: "waiting" }, `Its machine ${node.lease.words}.`),
    node.lease.trouble !== null && h("p", { class: "failure" }, `Taken for no lease: ${node.lease.trouble}`),
    node.links.filter((link) => link.failure).map((link) => h("p", { class: "failure" }, `Cannot reach ${link.to}: ${link.failure}${link.relay ? `; they meet by ${link.relay}` : ""}`)),
    quiet(joined(node.zone && `zone ${node.zone}`, node.address, node.platform, `motley ${node.version}`)),
  );
}

function drawMesh(nodes) {
  learnColours(nodes);
  const here = nodes.filter((node) => node.state !== "left");
  morphList($("nodes"), here.map((node) => (node.state === "lost" ? lostCard(node) : nodeCard(node))));
  morphList($("left"), nodes.filter((node) => node.state === "left").map(leftLine));
  const alive = nodes.filter((node) => node.state === "alive");
  const order = alive.map((node) => node.name).join(", ");
  $("empty-mesh").hidden = alive.length > 0;
  tell($("shares-hint"), order && `Shares are weights like 3, 2, 1, one for each node in this order: ${order}.`);
}

// ---------------------------------------------------------------- sessions

const steps = new Map(); // by session: its latest decode steps, and after how many tokens they were read

async function readSteps(sessions) {
  const fresh = ({ id, ranks: [leader] }) => leader?.timing && steps.get(id)?.tokens !== leader.timing.tokens;
  const read = await Promise.allSettled(sessions.filter(fresh).map(({ id }) => get(`api/sessions/${id}`)));
  for (const { value: session } of read) { // undefined if it was closed meanwhile
    const timing = session?.ranks[0]?.timing;
    if (timing) steps.set(session.id, { tokens: timing.tokens, values: session.step_ms });
  }
  for (const id of steps.keys()) if (!sessions.some((session) => session.id === id)) steps.delete(id);
}

const maps = new Map(); // by session: where its experts are

async function readMaps(sessions) {
  const parallel = sessions.filter(({ experts, state }) => experts === "parallel" && state === "ready");
  const read = await Promise.allSettled(parallel.map(({ id }) => get(`api/sessions/${id}/experts`)));
  maps.clear();
  for (const { value: map } of read) if (map) maps.set(map.session, map);
}

/** How the model is cut: a piece for each rank and expert host, in its node's colour. */
function cutBar(ranks, hosts) {
  const piece = (node, role, fraction) => {
    const label = `${node} (${role}): ${percent(fraction)}`;
    return h("span", { class: colour(node), grow: fraction, title: label }, `${node} · ${percent(fraction)}`);
  };
  const pieces = [
    ...ranks.map(({ rank, node, share }) => piece(node, `rank ${rank}`, share.fraction)),
    ...hosts.map(({ node, fraction }) => piece(node, "experts", fraction)),
  ];
  return h("div", { class: "bar cut", role: "img", "aria-label": pieces.map((each) => each.title).join(", ") }, pieces);
}

const TIMES = ["compute", "wire", "wait"];
const timesOf = (timing) => TIMES.map((name) => [name, timing[`${name}_ms`]]);
const total = (timing) => timesOf(timing).reduce((sum, [, value]) => sum + value, 0);

/** Where a token's time goes on one rank; `longest` ms are as long as the bar can be. */
function timeBar(timing, longest) {
  const label = `${timesOf(timing).map(([name, value]) => `${name} ${ms(value)}`).join(" · ")} ms`;
  const pieces = timesOf(timing).map(([name, value]) => h("span", { class: name, grow: value / longest }));
  return [h("div", { class: "bar time", role: "img", "aria-label": label }, pieces), quiet(label)];
}

function loadingBar({ done_bytes: done, total_bytes: all }) {
  const label = `${scaled(done, "B")} of ${scaled(all, "B")} read`;
  return [h("progress", { value: done, max: all, "aria-label": label }), quiet(label)];
}

function rankRow(rank, longest, mixed) {
  const { share, memory, timing } = rank;
  const state = rank.state === "ready" ? `loaded in ${rank.load_s.toFixed(1)} s` : rank.state;
  const used = memory.peak_rss_bytes ?? memory.rss_bytes;
  return h(
    "li",
    {},
    h("div", {},
      h("p", {}, h("span", { class: `swatch ${colour(rank.node)}` }), h("b", {}, rank.node), ` (rank ${rank.rank})`),
      quiet(joined(rank.rank === 0 && "leader", state)),
      mixed && quiet(joined(rank.engine, rank.quantisation, rank.device === "gpu" && "on its GPU"))),
    h("div", {},
      h("p", {}, `${percent(share.fraction)} of the weights${share.layers ? `, in layers ${share.layers[0]} to ${share.layers[1] - 1}` : ""}`),
      quiet(`units: ${share.attention} attention, ${share.mlp} MLP, ${share.vocabulary} vocab`),
      quiet(used ? `at most ${scaled(used, "B")} of memory used` : `${scaled(memory.planned_bytes, "B")} of memory planned`)),
    h("div", {},
      rank.state === "loading" && rank.loading.total_bytes > 0 && loadingBar(rank.loading),
      timing?.tokens > 0 && timeBar(timing, longest)),
  );
}

function quantile(sorted, q) {
  const at = q * (sorted.length - 1);
  const low = sorted[Math.floor(at)];
  return low + (sorted[Math.ceil(at)] - low) * (at % 1);
}

/** The latest decode steps as a line. */
function plot(values) {
  const shown = values.slice(-PLOTTED_STEPS);
  const sorted = [...shown].sort((a, b) => a - b);
  const [p50, p99, slowest] = [0.5, 0.99, 1].map((q) => quantile(sorted, q));
  const top = Math.min(slowest, 2 * p99) * 1.08; // a rare outlier leaves the picture, not its scale
  const y = (value) => (100 * (1 - value / top)).toFixed(2);
  const points = shown.map((value, index) => `${((1000 * index) / Math.max(1, shown.length - 1)).toFixed(1)},${y(value)}`);
  const level = (value, name) => svg("line", { x1: 0, x2: 1000, y1: y(value), y2: y(value), class: name });
  const caption = `p50 ${ms(p50)} ms · p99 ${ms(p99)} ms · slowest ${ms(slowest)} ms`;
  const picture = { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": caption };
  return h(
    "figure",
    {},
    h("figcaption", { class: "row" }, h("span", {}, `Last ${plural(shown.length, "decode step")}`), h("span", {}, caption)),
    svg("svg", picture, level(p50, "p50"), level(p99, "p99"), svg("polyline", { points: points.join(" ") })),
    h("p", { class: "quiet axis" }, h("span", {}, `0 to ${ms(top)} ms${top < slowest ? ", what is slower is cut off" : ""}`), ["p50", "p99"].map(legend)),
  );
}

const legend = (name) => h("span", { class: `key ${name}` }, name);

/** What the caches hold, how many requests there are, and what they have been spared. */
function activityOf(activity) {
  const { active, waiting, blocks, blocks_used: used, blocks_kept: kept, block_tokens: tokens } = activity;
  const pieces = [["in use", "used", used], ["kept for prompts that begin alike", "kept", kept], ["free", "free", blocks - used - kept]];
  const label = pieces.map(([name, , count]) => `${count} ${name}`).join(", ");
  const part = (some, all) => (all > 0 ? `${some} of ${all} (${percent(some / all)})` : "none yet");
  return h(
    "figure",
    { class: "activity" },
    h("figcaption", { class: "row" },
      h("span", {}, `Caches: ${plural(blocks, "block")} of ${plural(tokens, "token")}`),
      pieces.map(([name, kind, count]) => h("span", { class: `quiet key ${kind}` }, `${count} ${name}`))),
    h("div", { class: "bar blocks", role: "img", "aria-label": label },
      pieces.map(([, kind, count]) => h("span", { class: kind, grow: count / blocks }))),
    h("dl", { class: "tally" },
      fact("Requests under way", active),
      fact("Waiting", waiting),
      fact("Prompt tokens found in caches", part(activity.cached_tokens, activity.prompt_tokens)),
      fact("Guesses accepted", part(activity.accepted_drafts, activity.tried_drafts)),
      fact("Tokens generated", activity.generated_tokens),
      activity.far_blocks > 0 && fact("Far blocks in use", part(activity.far_blocks_used, activity.far_blocks)),
      activity.blocks_on_disk > 0 && fact("Blocks kept on disk for the next start", activity.blocks_on_disk),
      activity.windowed_blocks > 0
        && fact("Blocks of layers with a window in use", part(activity.windowed_blocks_used, activity.windowed_blocks))),
    activity.trouble && h("p", { class: "failure" }, activity.trouble),
  );
}

function lossesOf(losses, interruptedBy) {
  if (interruptedBy !== null) return h("p", { class: "waiting" }, `Waits for another plan: ${interruptedBy}`);
  if (losses.length === 0) return false;
  const { message } = losses[losses.length - 1];
  const times = losses.length === 1 ? "one time" : `${losses.length} times`;
  return h("p", { class: "quiet" }, `Has lost a machine or a process ${times} and gone on, the last time: ${message}`);
}

function sessionCard(session) {
  const { state, failure, ranks, hosts } = session;
  const map = maps.get(session.id);
  const here = hosts.filter(({ state }) => state !== "gone");
  const name = session.name || session.model;
  const timings = ranks.map((rank) => rank.timing).filter((timing) => timing?.tokens > 0);
  const longest = Math.max(...timings.map(total));
  const mixed = [session.engines, session.quantisations].some((own) => Object.keys(own).length > 0);
  const verb = state === "failed" ? "Dismiss" : "Close";
  const close = { type: "button", "data-close": session.id, "aria-label": `${verb} session ${name}` };
  const latest = steps.get(session.id)?.values ?? [];
  return h(
    "article",
    { class: `panel ${state}`, "data-key": session.id, "aria-label": `Session ${name}` },
    h("div", { class: "row" }, h("h3", { class: "name" }, name), badge(state), state !== "closing" && h("button", close, verb)),
    quiet(joined(
      session.family && `${session.family}, ${scaled(session.parameters, " parameters")}`,
      session.matrices ? `matrices: ${session.matrices}` : session.quantisation,
      session.context > 0 && `context ${session.context} tokens`,
      session.cache_tokens !== session.context && `${session.cache_tokens} tokens in caches`,
      session.cache_disk_tokens > 0 && `${session.cache_disk_tokens} on disk`,
      session.cache_node_tokens > 0 && `${session.cache_node_tokens} on ${session.cache_holders.map((holder) => holder.node).join(" and ")}`,
      session.cache_format !== "fp32" && `caches in ${session.cache_format}`,
      session.keep_prefixes && "prefixes kept on disk",
      session.draft_model && `${session.draft_model.split(/[\\/]/).pop()} guesses tokens`,
      session.weight_bytes > 0 && `${scaled(session.weight_bytes, "B")} of weights`,
      session.experts && `experts ${session.experts}`,
      !mixed && session.engine)),
    h("p", { class: "quiet path" }, session.model),
    failure && h("p", { class: "failure" }, `Failed: ${failure.message}`),
    ON_THE_WAY[state] && h("p", {}, ON_THE_WAY[state]),
    !failure && lossesOf(session.losses, session.interrupted_by),
    session.forecast && quiet(joined(
      `Forecast: ${ms(session.forecast.ms_per_token)} ms per token`,
      `compute ${ms(session.forecast.compute_ms)}, wire ${ms(session.forecast.wire_ms)}, wait ${ms(session.forecast.wait_ms)}`,
      session.measured_ms_per_token ? `measured: ${ms(session.measured_ms_per_token)} ms` : "not measured yet")),
    waiting(session.waiting_for),
    ranks.length > 0 && cutBar(ranks, here),
    session.activity && activityOf(session.activity),
    timings.length > 0 &&
      h("p", { class: "legend" }, `Where a token's time goes, mean of ${timings[0].tokens}:`, TIMES.map(legend)),
    h("ul", { class: "ranks" }, ranks.map((rank) => rankRow(rank, longest, mixed)), here.map((host) => hostRow(host, map, loadingBar))),
    hosts.filter(({ state, lost }) => state === "gone" && lost).map(({ node, lost }) => quiet(`${node} (experts): ${lost}`)),
    map && expertMap(map),
    latest.length > 0 && plot(latest),
  );
}

$("sessions").addEventListener("click", (event) => {
  const moved = event.target.dataset.rebalance;
  if (moved) rebalance(moved).catch((error) => alert(words(error)));
  const id = event.target.dataset.close;
  if (!id) return;
  const serving = event.target.closest("article").classList.contains("ready");
  if (serving && !confirm("Close this session? Its ranks are released, and answers under way break off.")) return;
  const shown = () => refresh(); // whatever became of it
  call(`api/sessions/${id}`, { method: "DELETE" }).then(shown, shown);
});

$("create").addEventListener("submit", async (event) => {
  event.preventDefault();
  const { model, quantisation, context, shares, experts, replicas, keep_prefixes: keep } = event.target.elements;
  const body = { model: model.value.trim(), quantisation: quantisation.value, experts: experts.value };
  if (replicas.value) body.replicas = replicas.valueAsNumber;
  if (context.value) body.context = context.valueAsNumber;
  if (keep.checked) body.keep_prefixes = true;
  if (shares.value.trim()) body.shares = shares.value.trim().split(/[\s,;]+/).map(Number);
  tell($("create-error"), "");
  const button = $("start");
  [button.disabled, button.textContent] = [true, "Planning…"];
  try {
    await call("api/sessions", { method: "POST", body });
    $("new").open = false;
  } catch (error) {
    tell($("create-error"), `Not started: ${words(error)}`);
  }
  [button.disabled, button.textContent] = [false, "Start session"];
  refresh();
});

// ---------------------------------------------------------------- polling

let seen = null; // when the orchestrator last answered
let refreshing = false;

async function refresh() {
  if (refreshing || document.hidden || $("key").open) return;
  refreshing = true;
  try {
    const [{ nodes }, { sessions }] = await Promise.all([get("api/nodes"), get("api/sessions")]);
    await Promise.all([readSteps(sessions), readMaps(sessions)]);
    drawMesh(nodes);
    drawSummary(nodes, sessions);
    morphList($("sessions"), sessions.map(sessionCard));
    $("no-sessions").hidden = sessions.length > 0;
    if (!seen) $("new").open = !sessions.length; // from then on it is as the user wants it
    drawModels(sessions);
    seen = new Date();
    tell($("banner"), "");
  } catch (error) {
    const keyless = error.status === 401;
    if (keyless) askForKey();
    const since = seen && !(error instanceof ApiError) ? ` What is shown was true at ${seen.toLocaleTimeString()}.` : "";
    tell($("banner"), keyless ? "" : `${words(error)} Trying again every second.${since}`);
  }
  $("state").classList.toggle("stale", !$("banner").hidden);
  refreshing = false;
}

function drawSummary(nodes, sessions) {
  const alive = nodes.filter((node) => node.state === "alive");
  const offered = alive.reduce((sum, node) => sum + node.memory_bytes, 0);
  const ready = sessions.filter((session) => session.state === "ready").length;
  tell($("summary"), joined(plural(alive.length, "node"), `${scaled(offered, "B")} offered`, `${plural(ready, "model")} ready`));
}

function askForKey() {
  $("key-error").hidden = apiKey.get() === null;
  apiKey.forget();
  $("key").showModal();
}

$("key").addEventListener("submit", (event) => {
  const field = event.target.elements.key;
  apiKey.set(field.value.trim());
  field.value = "";
});
$("key").addEventListener("close", refresh);

document.addEventListener("visibilitychange", refresh);
setInterval(refresh, POLL_MS);
refresh();
