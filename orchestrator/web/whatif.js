// "What if I add ...": what a token would take with another machine, beside what it takes.

import { $, call, get, h, ms, quiet, tell, words } from "./common.js";

const WAITED_MS = 60_000;
let session = null; // that is asked about

const speed = (each) => 1000 / each;

/** The body of a plan for a session as it is, on whichever machines are best. */
function bodyOf(asked) {
  const { model, quantisation, context, cache_format: format, engine, wire } = asked;
  return { model, quantisation, context, cache_format: format, engine, wire };
}

const plan = async (body) =>
  (await call("api/plan", { method: "POST", body, signal: AbortSignal.timeout(WAITED_MS) })).json();

/** Speeds as bars, the best as long as there is room. */
export function speedBars(rows) {
  const best = Math.max(...rows.map(([, each]) => speed(each)));
  return h("dl", { class: "speeds" }, rows.map(([name, each, note]) =>
    h("div", {},
      h("dt", {}, name),
      h("dd", {},
        h("div", { class: "bar" },
          h("span", { class: "load", grow: speed(each) / best }), h("span", { grow: 1 - speed(each) / best })),
        h("span", {}, `${speed(each).toFixed(speed(each) < 10 ? 1 : 0)} tokens/s, ${ms(each)} ms each`,
          note && h("span", { class: "quiet" }, ` · ${note}`))))));
}

export async function showWhatIf(asked) {
  session = asked;
  tell($("whatif-title"), `What if I add a machine to ${asked.name}?`);
  $("whatif-result").replaceChildren();
  tell($("whatif-error"), "");
  $("whatif").showModal();
  const { devices } = await get("api/devices").catch(() => ({ devices: [] }));
  $("devices").replaceChildren(...devices.map((name) => h("option", { value: name })));
}

$("whatif-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const { device, link } = event.target.elements;
  const added = [device.value.trim(), link.value].filter(Boolean).join(", ");
  const button = $("whatif-go");
  [button.disabled, button.textContent] = [true, "Planning…"];
  tell($("whatif-error"), "");
  try {
    const body = bodyOf(session);
    const [now, then] = await Promise.all([plan(body), plan({ ...body, what_if: [added] })]);
    const takes = then.plan.ranks.some(({ node }) => node === added);
    const order = ({ plan: { ranks } }) => ranks.map(({ node }) => node).join(", ");
    const rows = [
      session.measured_ms_per_token && ["Measured now", session.measured_ms_per_token],
      ["Forecast now", now.forecast.ms_per_token, order(now)],
      [`With ${added}`, then.forecast.ms_per_token, takes ? order(then) : "it would not take part: a token is quicker without it"],
    ].filter(Boolean);
    const room = takes && then.plan.ranks.find(({ node }) => node === added);
    $("whatif-result").replaceChildren(
      speedBars(rows), ...(room ? [quiet(`It would hold ${room.memory_mb.toFixed(0)} MB of the model.`)] : []));
  } catch (error) {
    tell($("whatif-error"), words(error));
  }
  [button.disabled, button.textContent] = [false, "Forecast"];
});
$("whatif-close").addEventListener("click", () => $("whatif").close());
