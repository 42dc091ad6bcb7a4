// The page: everything is asked for every second, less often while nobody answers, and drawn.

import { drawAccess, forgetAccess, listen as listenToAccess, readAccess } from "./access.js";
import { listen as listenToAdapters } from "./adapters.js";
import { drawModels } from "./chat.js";
import { $, ApiError, apiKey, get, joined, later, plural, scaled, tell, words } from "./common.js";
import { drawOrder, listen as listenToForm } from "./create.js";
import { drawFit, listen as listenToFit } from "./fit.js";
import { drawJobs, listen as listenToJobs } from "./jobs.js";
import { drawMesh, listen as listenToMachines } from "./mesh.js";
import { drawRequests, drawSessions, listen as listenToSessions, readMaps, readSteps } from "./sessions.js";

const POLL_MS = 1000;

let seen = null; // when the orchestrator last answered
let refreshing = false;
let pause = POLL_MS; // until it is all asked for again
let due = 0; // the timer for that

async function refresh() {
  if (refreshing || document.hidden || $("key").open) return; // the end of each of these has it refreshed
  refreshing = true;
  clearTimeout(due);
  const read = await readAll().catch(tellTrouble);
  refreshing = false;
  pause = read ? POLL_MS : later(pause);
  due = setTimeout(refresh, pause);
  $("state").classList.toggle("stale", !read);
  if (read) draw(read);
}

async function readAll() {
  const { nodes } = await get("api/nodes"); // alone: where nobody answers, one call fails and not four
  const [{ sessions }, { requests }, { jobs }] = await Promise.all(["sessions", "requests", "jobs"].map((each) => get(`api/${each}`)));
  const [access] = await Promise.all([readAccess(), readSteps(sessions), readMaps(sessions)]);
  return { nodes, sessions, requests, jobs, access };
}

function draw({ nodes, sessions, requests, jobs, access }) {
  const alive = drawMesh(nodes, sessions);
  drawOrder(alive);
  drawFit(alive);
  drawSummary(alive, sessions);
  drawSessions(sessions);
  drawRequests(requests);
  drawAccess(access);
  drawJobs(jobs);
  if (!seen) $("new").open = !sessions.length; // from then on it is as the user wants it
  drawModels(sessions);
  seen = new Date();
  tell($("banner"), "");
}

function tellTrouble(error) {
  const keyless = error.status === 401;
  if (keyless) askForKey();
  const since = seen && !(error instanceof ApiError) ? ` What is shown was true at ${seen.toLocaleTimeString()}.` : "";
  tell($("banner"), keyless ? "" : `${words(error)} Trying again every few seconds.${since}`);
}

function drawSummary(alive, sessions) {
  const offered = alive.reduce((sum, node) => sum + node.memory_bytes, 0);
  const ready = sessions.filter((session) => session.state === "ready").length;
  tell($("summary"), joined(plural(alive.length, "machine"), `${scaled(offered, "B")} offered`, `${plural(ready, "model")} ready`));
}

function askForKey() {
  $("key-error").hidden = apiKey.get() === null;
  apiKey.forget();
  $("key").showModal();
}

$("key").addEventListener("submit", (event) => {
  const field = event.target.elements.key;
  apiKey.set(field.value.trim());
  forgetAccess();
  field.value = "";
});
$("key").addEventListener("close", refresh);

listenToAccess(refresh);
listenToAdapters(refresh);
listenToForm(refresh);
listenToFit();
listenToMachines(refresh);
listenToSessions(refresh);
listenToJobs(refresh);
document.addEventListener("visibilitychange", refresh);
new ResizeObserver(refresh).observe($("picture"));
refresh();
