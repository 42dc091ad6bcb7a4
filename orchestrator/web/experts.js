// The map of a session's experts: expert by group of layers, in the colours of the nodes that have them.

import { call, colour, h, joined, ms, percent, plural, scaled } from "./common.js";

const STATES = { serving: "serves", fetching: "is on its way", leaving: "is let go", dead: "is lost" };

const layersOf = ({ layers }) => (layers.length === 1 ? `layer ${layers[0]}` : `layers ${layers[0]}–${layers.at(-1)}`);

/** One expert in one group of layers: who has it, and beneath, how often it is chosen. */
function cell(map, group, expert, most) {
  const order = Object.keys(STATES);
  const has = [...expert.hosts].sort((a, b) => order.indexOf(a.state) - order.indexOf(b.state) || a.host - b.host);
  const who = has.map(({ host, state, layers }) => {
    const some = group.layers.length > 1 ? ` (${layers} of ${group.layers.length} layers)` : "";
    return `on ${map.hosts[host].node} it ${STATES[state]}${some}`;
  });
  const label = `Expert ${expert.index}, ${layersOf(group)}: ${who.join(", ") || "nobody has it"}; chosen ${expert.load.toFixed(2)} × its even share`;
  const pieces = has.map(({ host, state, layers }) =>
    h("span", { class: `${colour(map.hosts[host].node)} ${state}`, grow: layers }));
  const load = h("span", { class: "load", grow: expert.load / most });
  return h("td", { title: label, "aria-label": label },
    h("div", { class: "bar" }, pieces), h("div", { class: "bar often" }, load, h("span", { grow: 1 - expert.load / most })));
}

/** The table of all experts. */
export function expertMap(map) {
  const most = Math.max(...map.groups.flatMap((group) => group.experts.map((expert) => expert.load)));
  const rows = map.groups[0].experts.map(({ index }) =>
    h("tr", {}, h("th", { scope: "row" }, index), map.groups.map((group) => cell(map, group, group.experts[index], most))));
  const used = new Set(map.groups.flatMap((group) => group.experts.flatMap(({ hosts }) => hosts.map(({ state }) => state))));
  const { asked, least } = map.replicas;
  const shown = map.groups.flatMap((group) => group.experts.flatMap(({ hosts }) => hosts.map(({ host }) => map.hosts[host].node)));
  return h(
    "figure",
    { class: "experts" },
    h("figcaption", { class: "row" },
      h("span", {}, joined(
        `${plural(map.experts, "expert")} of each layer`,
        `${asked} of each asked for, ${least} there at least`,
        map.moves > 0 && `${plural(map.moves, "replica")} on the move`,
        `${scaled(map.bytes_out, "B")} sent, ${scaled(map.bytes_in, "B")} received`)),
      h("button", { type: "button", "data-rebalance": map.session }, "Rebalance")),
    map.short && h("p", { class: "quiet" }, map.short),
    h("div", { class: "scroll", tabindex: 0 },
      h("table", {},
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "expert"), map.groups.map((group) => h("th", { scope: "col" }, layersOf(group))))),
        h("tbody", {}, rows))),
    h("p", { class: "legend" },
      [...new Set(shown)].sort().map((node) => h("span", {}, h("span", { class: `swatch ${colour(node)}` }), node)),
      Object.keys(STATES).filter((state) => state !== "serving" && used.has(state)).map((state) => h("span", { class: `key ${state}` }, state)),
      h("span", { class: "key load" }, `how often it is chosen, at most ${most.toFixed(1)} × its even share`)),
  );
}

/** What a host does, from the session and, if it is there already, the map. */
export function hostRow(host, map, loadingBar) {
  const measured = map?.hosts[host.host];
  const stalls = measured?.stalls_ms ?? [];
  const used = host.memory.rss_bytes;
  return h(
    "li",
    {},
    h("div", {},
      h("p", {}, h("span", { class: `swatch ${colour(host.node)}` }), h("b", {}, host.node), " (experts)"),
      h("p", { class: "quiet" }, joined(
        host.state === "ready" ? `loaded in ${host.load_s.toFixed(1)} s` : host.state,
        host.group && `${host.group.map(({ slices }) => slices).join(" + ")} slices of each expert`,
        host.zone && `zone ${host.zone}`))),
    h("div", {},
      h("p", {}, `${plural(host.experts, "expert")}, ${percent(host.fraction)} of the weights`),
      h("p", { class: "quiet" }, used ? `${scaled(used, "B")} of memory used` : `${scaled(host.memory.planned_bytes, "B")} of memory planned`)),
    h("div", {},
      host.state === "loading" && host.loading.total_bytes > 0 && loadingBar(host.loading),
      measured?.rows > 0 && [
        h("p", {}, `${percent(measured.load)} of all rows`),
        h("p", { class: "quiet" }, joined(
          `round trip ${ms(measured.round_trip_ms)} ms`,
          `waited for ${measured.wait_s.toFixed(1)} s`,
          stalls.length > 0 && `${plural(stalls.length, "stall")}, the longest ${ms(Math.max(...stalls))} ms`)),
      ]),
  );
}

/** What requests wait for, if experts have no host. */
export function waiting(names) {
  const more = names.length > 5 ? ` and ${names.length - 5} more` : "";
  return names.length > 0 && h("p", { class: "waiting" }, `No host has ${names.slice(0, 5).join(", ")}${more}: requests that need it wait.`);
}

export const rebalance = (session) => call(`api/sessions/${session}/experts/rebalance`, { method: "POST" });
