// The machines: each as a card, and all of them with their links as a picture.

import { ask, tellError } from "./dialogs.js";
import {
  $, ago, badge, call, colour, fact, h, joined, learnColours, morph, morphList, percent, plural, quiet, scaled, swatch, svg,
} from "./common.js";

const SILENT_S = 2.5;
const [RING, WHOLE] = [40, 34]; // radius of a machine in the picture, and of the disc of one that has a whole model
const LABELLED = 4; // with more machines than so many, links have their numbers in the cards alone
const LINKED = { narrow: 7, wide: 10 }; // with more, links would hide everything else
const LISTED = 3; // links that a card shows one by one
const LETTER = 9.5; // a letter's width, in the mean

function memoryBar(node) {
  const [reserved, offered] = [node.memory_reserved_bytes, node.memory_bytes];
  const label = `${scaled(reserved, "B")} of ${scaled(offered, "B")} memory in use by models`
    + (node.gpu_budget_bytes ? `, at most ${scaled(node.gpu_budget_bytes, "B")} of its GPU` : "");
  const used = Math.min(1, reserved / offered || 0);
  const pieces = [h("span", { class: colour(node.name), grow: used }), h("span", { grow: 1 - used })];
  return [h("div", { class: "bar", role: "img", "aria-label": label }, pieces), quiet(label)];
}

/** A machine that has left: one line, and nothing to worry about. */
const leftLine = (node) =>
  h("li", { class: "quiet", "data-key": node.name }, swatch(node.name), `${node.name} left ${ago(node.gone_s)}`);

function lostCard(node) {
  return h(
    "li",
    { class: "panel node lost", "data-key": node.name },
    h("div", { class: "row" }, h("h3", { class: "name" }, swatch(node.name), node.name), badge("lost")),
    h("p", { class: "failure" }, `Lost ${ago(node.gone_s)}: ${node.lost}.`),
    quiet("If it runs, it comes back by itself; if not, start ", h("code", {}, "motley join"), " there again."));
}

const rate = (bytes) => scaled(8 * bytes, "bit/s");
const delay = (each) => (each < 0.1 ? `${Math.max(1, Math.round(1000 * each))} µs` : `${each.toFixed(each < 10 ? 1 : 0)} ms`);
const linkText = (link) => `${delay(link.latency_ms)}, ${rate(link.bandwidth)}`;
const linkList = (links) => links.map((link) => h("div", {}, `${link.to}: ${linkText(link)}`));

/** The links of a card: each of them, or where they are many, the slowest. */
function linksOf(links) {
  if (links.length <= LISTED) return linkList(links);
  const slowest = links.reduce((one, other) => (other.bandwidth < one.bandwidth ? other : one));
  return `${links.length}, the slowest to ${slowest.to}: ${linkText(slowest)}`;
}

function nodeCard(node) {
  const models = new Set([...node.ranks, ...node.expert_hosts].map(({ model }) => model));
  const gpus = node.gpus.map((gpu) => joined(gpu.name, gpu.kind, scaled(gpu.memory_bytes, "B")));
  const reached = node.links.filter((link) => !link.failure);
  const onGpu = node.engines.filter((engine) => engine.on_gpu && !engine.lacking).map((engine) => engine.name);
  return h(
    "li",
    { class: "panel node", "data-key": node.name },
    h("div", { class: "row" },
      h("h3", { class: "name" }, swatch(node.name), node.name),
      badge(node.silence_s > SILENT_S ? "silent" : node.lease.words !== null ? "lent" : node.state)),
    memoryBar(node),
    h("dl", {},
      fact("Serves", [...models].join(", ") || "nothing"),
      fact("Processor", joined(node.cpu, plural(node.cores, "core"))),
      fact("GPU", joined(gpus.join("; ") || "none", gpus.length && onGpu.length && `used by ${onGpu.join(", ")}`)),
      reached.length > 0 && fact("Links", linksOf(reached))),
    node.aside_s !== null && h("p", { class: "waiting" }, `Comes and goes: it is set aside for ${Math.ceil(node.aside_s / 60)} min more.`),
    node.lease.words !== null && h("p", { class: "waiting" }, `${node.name} ${node.lease.words}.`),
    node.lease.trouble !== null && h("p", { class: "failure" }, `Taken for no lease: ${node.lease.trouble}`),
    node.links.filter((link) => link.failure).map((link) =>
      h("p", { class: "failure" }, `Cannot reach ${link.to}: ${link.failure}${link.relay ? `; they meet by ${link.relay}` : ""}`)),
    h("details", {},
      h("summary", { class: "quiet" }, "More"),
      h("dl", {},
        fact("Reads memory at", scaled(node.memory_bandwidth, "B/s")),
        node.speeds.length > 0 && fact("Computes", node.speeds.map((own) => `${own.format} ${scaled(own.bytes_per_s, "B/s")}`).join(", ")),
        node.zone && fact("Zone", node.zone),
        fact("Address", node.address),
        fact("System", joined(node.platform, `motley ${node.version}`)),
        reached.length > LISTED && fact("Links", linkList(reached))),
      h("button", { type: "button", "data-leave": node.name, "aria-label": `Have it leave: ${node.name}` }, "Have it leave")),
  );
}

// ---------------------------------------------------------------- the picture

/** What part of all weights that are loaded each node has, by its name. */
function sharesOf(sessions) {
  const bytes = new Map();
  const add = (node, count) => bytes.set(node, (bytes.get(node) ?? 0) + count);
  for (const { ranks, hosts } of sessions) {
    for (const { node, state, share } of ranks) if (state !== "gone") add(node, share.weight_bytes);
    for (const { node, group, weight_bytes: held } of hosts) {
      for (const member of group ?? [{ node }]) add(member.node, held / (group?.length ?? 1));
    }
  }
  const all = [...bytes.values()].reduce((sum, count) => sum + count, 0);
  return new Map([...bytes].map(([node, count]) => [node, all ? count / all : 0]));
}

const isNarrow = (width) => width < 480;
const areLinked = (count, width) => count <= (isNarrow(width) ? LINKED.narrow : LINKED.wide);

/** Where so many machines stand in a picture of this width, and how many letters fit there: on an ellipse, the first on
 * the left or on top. What is said of a machine in the upper half stands above it, so that nothing but links is between
 * them. Those without links stand in rows. */
function placesFor(count, width) {
  const narrow = isNarrow(width);
  if (!areLinked(count, width)) {
    const inRow = Math.floor(width / (narrow ? 110 : 150));
    const most = Math.floor(width / inRow / LETTER);
    const places = Array.from({ length: count }, (_, index) => (
      { x: (width * ((index % inRow) + 0.5)) / inRow, y: RING + 8 + (2 * RING + 66) * Math.floor(index / inRow), above: false, most }));
    return { places, height: places.at(-1).y + RING + 62 };
  }
  const rx = Math.min(width / 2 - (narrow ? 62 : 100), 330);
  const ry = count < 3 ? 0 : Math.max(narrow ? 85 : 75, count * (narrow ? 28 : 20));
  const top = RING + (count < 3 ? 8 : 60);
  const from = count === 2 ? Math.PI : -Math.PI / 2;
  const places = Array.from({ length: count }, (_, index) => {
    const angle = from + (2 * Math.PI * index) / count;
    return { x: width / 2 + (count > 1 ? rx * Math.cos(angle) : 0), y: top + ry + ry * Math.sin(angle), above: ry > 0 && Math.sin(angle) < -0.1, most: narrow ? 16 : 26 };
  });
  const bottom = Math.max(...places.map(({ y }) => y));
  return { places, height: bottom + RING + 62 };
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** An arc along the ring of a machine, clockwise from the top, of this part of the whole. */
function arc({ x, y }, part) {
  const angle = 2 * Math.PI * Math.min(part, 0.9999) - Math.PI / 2;
  const far = part > 0.5 ? 1 : 0;
  return `M${x},${y - RING}A${RING},${RING},0,${far},1,${(x + RING * Math.cos(angle)).toFixed(1)},${(y + RING * Math.sin(angle)).toFixed(1)}`;
}

function machine(node, place, share) {
  const { x, y, above, most } = place;
  const device = node.gpus[0]?.name.replace(/NVIDIA |GeForce |AMD |Radeon /g, "") ?? plural(node.cores, "core");
  const lost = node.state === "lost";
  const lines = lost
    ? [["name", node.name], ["bad", `lost ${ago(node.gone_s)}`]]
    : [["name", node.name], ["", `${device} · ${scaled(node.memory_bytes, "B")}`], share > 0 && ["", `holds ${percent(share)}`]];
  const shown = lines.filter(Boolean);
  const first = above ? y - RING - 10 - 16 * (shown.length - 1) : y + RING + 18;
  return svg(
    "g",
    { class: lost ? "lost" : "" },
    svg("circle", { class: "ring", cx: x, cy: y, r: RING }),
    !lost && node.memory_reserved_bytes > 0
      && svg("path", { class: `used ${colour(node.name)}`, d: arc(place, node.memory_reserved_bytes / node.memory_bytes) }),
    !lost && share > 0 && svg("circle", { class: `held ${colour(node.name)}`, cx: x, cy: y, r: (WHOLE * Math.sqrt(share)).toFixed(1) }),
    shown.map(([kind, text], index) => svg("text", { class: kind, x, y: first + 16 * index }, short(text, most))),
  );
}

/** The link of two machines; `at` is where on it its numbers stand, from 0 to 1, or null for nowhere. */
function linkLine(one, other, from, to, at, narrow) {
  const way = one.links.find((link) => link.to === other.name);
  const back = other.links.find((link) => link.to === one.name);
  const known = [way, back].filter(Boolean);
  const broken = known.some((link) => link.failure);
  const [length, dx, dy] = [Math.hypot(to.x - from.x, to.y - from.y), to.x - from.x, to.y - from.y];
  const [ux, uy] = [((RING + 5) * dx) / length, ((RING + 5) * dy) / length];
  const ends = { x1: from.x + ux, y1: from.y + uy, x2: to.x - ux, y2: to.y - uy };
  const good = known.filter((link) => !link.failure);
  const slow = good.sort((a, b) => a.bandwidth - b.bandwidth)[0];
  const lines = broken ? ["no link"] : slow ? (narrow ? [delay(slow.latency_ms), rate(slow.bandwidth)] : [linkText(slow)]) : [];
  const wide = slow ? Math.max(1, Math.min(6, Math.log10(slow.bandwidth) - 5)) : 1; // 1 at 1 MB/s, a step for each tenfold
  const [x, y] = [from.x + at * dx, from.y + at * dy + (Math.abs(dy) < 1 ? -7 : 4) - 7 * (lines.length - 1)];
  return svg(
    "g",
    { class: broken ? "link broken" : known.length ? "link" : "link unknown" },
    svg("line", { ...ends, "stroke-width": wide }),
    at !== null && lines.map((text, index) => svg("text", { x, y: y + 14 * index }, text)),
  );
}

/** The machines as rings, filled with what of the models they hold, and the links between them. */
function picture(nodes, sessions, width) {
  const { places, height } = placesFor(nodes.length, width);
  const shares = sharesOf(sessions);
  const alive = nodes.map((node, index) => [node, places[index]]).filter(([node]) => node.state === "alive");
  const pairs = areLinked(nodes.length, width) ? alive.flatMap((one, index) => alive.slice(index + 1).map((other) => [one, other])) : [];
  const told = nodes.map((node) => (node.state === "lost" ? `${node.name} is lost` : `${node.name} holds ${percent(shares.get(node.name) ?? 0)}`));
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `The machines and their links: ${told.join(", ")}` },
    pairs.map(([[one, from], [other, to]]) => {
      const across = alive.length > 3 && Math.abs(places.indexOf(from) - places.indexOf(to)) === 2; // links that cross
      return linkLine(one, other, from, to, alive.length > LABELLED ? null : across ? 0.3 : 0.5, isNarrow(width));
    }),
    nodes.map((node, index) => machine(node, places[index], shares.get(node.name) ?? 0)),
  );
}

/** Have the buttons of machines do what they say; `refresh` shows what has become of it. */
export function listen(refresh) {
  $("nodes").addEventListener("click", async ({ target }) => {
    const { leave } = target.dataset;
    if (!leave || !(await ask(`Have ${leave} leave? First, its models go on without it, and nobody's answer ends.`, "Have it leave"))) return;
    await call(`api/nodes/${encodeURIComponent(leave)}/leave`, { method: "POST" }).catch(tellError);
    refresh();
  });
}

export function drawMesh(nodes, sessions) {
  learnColours(nodes);
  const here = nodes.filter((node) => node.state !== "left");
  const alive = here.filter((node) => node.state === "alive");
  const frame = $("picture");
  frame.hidden = !here.length;
  if (here.length) {
    const width = Math.max(280, frame.clientWidth || 0);
    const fresh = picture(here, sessions, width);
    frame.querySelector(".key.line").hidden = !areLinked(here.length, width);
    if (frame.firstElementChild?.nodeName === "svg") morph(frame.firstElementChild, fresh);
    else frame.prepend(fresh);
  }
  morphList($("nodes"), here.map((node) => (node.state === "lost" ? lostCard(node) : nodeCard(node))));
  morphList($("left"), nodes.filter((node) => node.state === "left").map(leftLine));
  $("empty-mesh").hidden = alive.length > 0;
  $("another").hidden = !alive.length;
  return alive;
}
