// The models that are served, each as a card: how it is cut, how fast it is, what it does; and the requests under way.

import { adaptersOf } from "./adapters.js";
import { ask, tellError } from "./dialogs.js";
import { expertMap, hostRow, rebalance, waiting } from "./experts.js";
import { $, badge, call, colour, fact, get, h, joined, morphList, ms, percent, plural, quiet, scaled, swatch } from "./common.js";
import { legend, plot, timeBar, timeline, TIMES, total } from "./steps.js";
import { showWhatIf } from "./whatif.js";

const ON_THE_WAY = {
  planning: "Reading the model's description and deciding who gets what…",
  starting: "Starting a process on each machine…",
  connecting: "The machines connect to each other…",
  loading: "Reading weights…",
  recovering: "A machine is not there any more: deciding who gets what now. Answers go on by themselves…",
  paused: "No way to run it fits the machines that are here now. It goes on by itself as soon as one does.",
  closing: "Releasing the machines…",
};

// ---------------------------------------------------------------- what is read beside the list

const details = new Map(); // by session: what it tells of its latest steps, and when that was read

/** Read the latest steps of sessions that have made some since. */
export async function readSteps(sessions) {
  const mark = ({ ranks: [leader], activity }) => `${leader?.timing?.tokens} ${activity?.active ? activity.generated_tokens : ""}`;
  const stale = sessions.filter((session) => session.ranks[0] && details.get(session.id)?.mark !== mark(session));
  const read = await Promise.allSettled(stale.map(({ id }) => get(`api/sessions/${id}`)));
  for (const { value: session } of read) { // undefined if it was closed meanwhile
    if (session) details.set(session.id, { mark: mark(session), step_ms: session.step_ms, ranks: session.ranks });
  }
  for (const id of details.keys()) if (!sessions.some((session) => session.id === id)) details.delete(id);
}

const maps = new Map(); // by session: where its experts are

export async function readMaps(sessions) {
  const parallel = sessions.filter(({ experts, state }) => experts === "parallel" && state === "ready");
  const read = await Promise.allSettled(parallel.map(({ id }) => get(`api/sessions/${id}/experts`)));
  maps.clear();
  for (const { value: map } of read) if (map) maps.set(map.session, map);
}

// ---------------------------------------------------------------- a session

/** How the model is cut: a piece for each machine, in its colour. */
function cutBar(ranks, hosts) {
  const piece = (node, role, fraction) => {
    const label = `${node}${role}: ${percent(fraction)}`;
    return h("span", { class: colour(node), grow: fraction, title: label }, `${node} · ${percent(fraction)}`);
  };
  const pieces = [
    ...ranks.map(({ node, share }) => piece(node, "", share.fraction)),
    ...hosts.map(({ node, fraction }) => piece(node, " (experts)", fraction)),
  ];
  return h("div", { class: "bar cut", role: "img", "aria-label": pieces.map((each) => each.title).join(", ") }, pieces);
}

function loadingBar({ done_bytes: done, total_bytes: all }) {
  const label = `${scaled(done, "B")} of ${scaled(all, "B")} read`;
  return [h("progress", { value: done, max: all, "aria-label": label }), quiet(label)];
}

const layersOf = ([first, end]) => (end - first === 1 ? `layer ${first}` : `layers ${first} to ${end - 1}`);

function rankRow(rank, longest, mixed) {
  const { share, memory, timing } = rank;
  const state = rank.state === "ready" ? `loaded in ${rank.load_s.toFixed(1)} s` : rank.state;
  const used = memory.peak_rss_bytes ?? memory.rss_bytes;
  return h(
    "li",
    {},
    h("div", {},
      h("p", {}, swatch(rank.node), h("b", {}, rank.node)),
      quiet(joined(rank.rank === 0 && "leads", state)),
      mixed && quiet(joined(rank.engine, rank.quantisation, rank.chosen ?? (rank.device === "gpu" && "on its GPU")))),
    h("div", {},
      h("p", {}, `${percent(share.fraction)} of the weights${share.layers ? `, in ${layersOf(share.layers)}` : ""}`),
      quiet(used ? `at most ${scaled(used, "B")} of memory used` : `${scaled(memory.planned_bytes, "B")} of memory planned`)),
    h("div", {},
      rank.state === "loading" && rank.loading.total_bytes > 0 && loadingBar(rank.loading),
      timing?.steps > 0 && timeBar(timing, longest)),
  );
}

/** What the caches hold, how many requests there are, and what they have been spared. */
function activityOf(activity) {
  const { active, waiting: wait, blocks, blocks_used: used, blocks_kept: kept, block_tokens: tokens } = activity;
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
      fact("Waiting", wait),
      fact("Prompt tokens found in caches", part(activity.cached_tokens, activity.prompt_tokens)),
      fact("Guesses accepted", part(activity.accepted_drafts, activity.tried_drafts)),
      fact("Tokens generated", activity.generated_tokens),
      activity.far_tiers.map(({ place, blocks: there, blocks_used: used, block_ms: cost }, at) => fact(
        `${at > 0 ? "Then b" : "B"}locks on ${place === "disk" ? "disk" : "other machines"} in use`,
        joined(part(used, there), cost > 0 && `${cost.toPrecision(2)} ms of a step for each`))),
      activity.blocks_on_disk > 0 && fact("Blocks kept on disk for the next start", activity.blocks_on_disk),
      activity.windowed_blocks > 0
        && fact("Blocks of layers with a window in use", part(activity.windowed_blocks_used, activity.windowed_blocks))),
    activity.trouble && h("p", { class: "failure" }, activity.trouble),
  );
}

function lossesOf(losses, interruptedBy) {
  if (interruptedBy !== null) return h("p", { class: "waiting" }, `Interrupted: ${interruptedBy}`);
  if (losses.length === 0) return false;
  const { message } = losses[losses.length - 1];
  const times = losses.length === 1 ? "one time" : `${losses.length} times`;
  return h("p", { class: "quiet" }, `Has lost a machine or a process ${times} and gone on, the last time: ${message}`);
}

const speed = (each) => `${(1000 / each).toFixed(each > 100 ? 1 : 0)} tokens/s`;

/** What a token was forecast to take, beside what a step takes, and a token if a step gives several. */
function forecastOf({ forecast, measured_ms_per_token: measured, measured_ms_per_step: step, tokens_per_step: tokens }) {
  const took = measured && joined(
    `${speed(measured)}, ${ms(step)} ms a step`,
    tokens > 1 && `which gives ${tokens.toFixed(2)} tokens with those that were guessed: ${ms(measured)} ms per token`);
  if (!forecast) return took && quiet(`Measured: ${took}`);
  const parts = Object.entries(TIMES).map(([name, words]) => `${words} ${ms(forecast[`${name}_ms`])}`).join(", ");
  return quiet(joined(
    `Forecast: ${speed(forecast.ms_per_token)}, ${ms(forecast.ms_per_token)} ms per token (${parts})`,
    took ? `measured: ${took}` : "not measured yet"));
}

/** What the session was asked to be, in a line. */
const settingsOf = (session, mixed) => quiet(joined(
  session.family && `${session.family}, ${scaled(session.parameters, " parameters")}`,
  session.matrices ? `matrices: ${session.matrices}` : session.quantisation,
  session.engine_options.activations === "fp16" && `products in fp16 by ${session.engine}`,
  session.context > 0 && `context ${session.context} tokens`,
  session.cache_tokens !== session.context && `${session.cache_tokens} tokens in caches`,
  session.cache_disk_tokens > 0 && `${session.cache_disk_tokens} on disk`,
  session.cache_node_tokens > 0 && `${session.cache_node_tokens} on ${session.cache_holders.map((holder) => holder.node).join(" and ")}`,
  session.cache_format !== "fp32" && `caches in ${session.cache_format}`,
  session.keep_prefixes && "prefixes kept on disk",
  session.embeddings && `for embeddings (${session.embeddings})`,
  session.draft_model && `${session.draft_model === "own" ? "its own head" : session.draft_model.split(/[\\/]/).pop()} guesses tokens`,
  session.weight_bytes > 0 && `${scaled(session.weight_bytes, "B")} of weights`,
  session.experts && `experts ${session.experts}`,
  session.exact && "exact",
  !mixed && session.engine));

function sessionCard(session) {
  const { state, failure, hosts } = session;
  const ranks = state === "paused" ? [] : session.ranks; // those it had are gone
  const map = maps.get(session.id);
  const here = hosts.filter(({ state: its }) => its !== "gone");
  const name = session.name || session.model;
  const timings = ranks.map((rank) => rank.timing).filter((timing) => timing?.steps > 0);
  const longest = Math.max(...timings.map(total));
  const mixed = session.ranks.some((rank) => rank.chosen)
    || [session.engines, session.quantisations].some((own) => Object.keys(own).length > 0);
  const verb = state === "failed" ? "Dismiss" : "Close";
  const close = { type: "button", "data-close": session.id, "aria-label": `${verb} session ${name}` };
  const latest = state === "paused" ? null : details.get(session.id);
  const plannable = state === "ready" && !here.length;
  return h(
    "article",
    { class: `panel ${state}`, "data-key": session.id, "aria-label": `Session ${name}` },
    h("div", { class: "row" }, h("h3", { class: "name" }, name), badge(state),
      plannable && h("button", { type: "button", "data-whatif": session.id }, "What if I add…"),
      state !== "closing" && h("button", close, verb)),
    settingsOf(session, mixed),
    h("p", { class: "quiet path" }, session.model),
    failure && h("p", { class: "failure" }, `Failed: ${failure.message}`),
    ON_THE_WAY[state] && h("p", {}, ON_THE_WAY[state]),
    !failure && lossesOf(session.losses, session.interrupted_by),
    session.missed_nodes.length > 0 &&
      quiet(`Asked for on ${session.nodes.join(", ")}; goes on without ${session.missed_nodes.join(" and ")}`),
    session.no_part.map(({ node, why }) => quiet(`${node} takes no part: ${why}`)),
    state !== "paused" && forecastOf(session),
    waiting(session.waiting_for),
    ranks.length > 0 && cutBar(ranks, here),
    latest && timeline(latest.ranks),
    timings.length > 0 &&
      h("p", { class: "legend" }, `Where a step's time goes, mean of ${timings[0].steps}:`, Object.keys(TIMES).map(legend)),
    h("ul", { class: "ranks" }, ranks.map((rank) => rankRow(rank, longest, mixed)), here.map((host) => hostRow(host, map, loadingBar))),
    hosts.filter(({ state: its, lost }) => its === "gone" && lost).map(({ node, lost }) => quiet(`${node} (experts): ${lost}`)),
    session.activity && activityOf(session.activity),
    session.adapters > 0 && state === "ready" && adaptersOf(session),
    map && expertMap(map),
    latest?.step_ms.length > 0 && plot(latest.step_ms),
  );
}

let shown = [];

export function drawSessions(sessions) {
  shown = sessions;
  morphList($("sessions"), sessions.map(sessionCard));
  $("no-sessions").hidden = sessions.length > 0;
}

/** Have the buttons of sessions do what they say; `refresh` shows what has become of it. */
export function listen(refresh) {
  $("sessions").addEventListener("click", async ({ target }) => {
    const { rebalance: moved, close, whatif } = target.dataset;
    if (moved) await rebalance(moved).catch(tellError);
    if (whatif) showWhatIf(shown.find(({ id }) => id === whatif));
    if (!close) return;
    const serving = target.closest("article").classList.contains("ready");
    const question = "Close this session? Its machines are released, and answers under way break off.";
    if (serving && !(await ask(question, "Close session"))) return;
    await call(`api/sessions/${close}`, { method: "DELETE" }).catch(() => {}); // whatever became of it, it is shown
    refresh();
  });
}

// ---------------------------------------------------------------- requests

const DOES = { waiting: "waits for its first token", answering: "is answered", held: "waits for its client", recovering: "waits for another plan" };

/** The requests under way, of all sessions. */
export function drawRequests(requests) {
  $("requests-part").hidden = !requests.length;
  morphList($("requests"), requests.map(({ name, model, state, seconds, tokens }, index) =>
    h("tr", { "data-key": `${name} ${index}` },
      h("td", { class: "path" }, name), h("td", {}, model), h("td", {}, DOES[state] ?? state),
      h("td", { class: "number" }, plural(tokens, "token")), h("td", { class: "number" }, `${seconds.toFixed(1)} s`))));
}
