// Where the time of steps goes, each of which gives every request a token or more: in the mean, and step by step.

import { h, ms, plural, quiet, svg, colour } from "./common.js";

const PLOTTED_STEPS = 400;
const TIMELINE_STEPS = 80;
const STRIP = 34; // height of a machine's strip in the timeline

/** What a machine does in a step, by the API's words, in words for everybody. */
export const TIMES = { compute: "computing", wire: "sending", wait: "waiting for others" };
const timesOf = (timing) => Object.keys(TIMES).map((name) => [name, timing[`${name}_ms`]]);
export const total = (timing) => timesOf(timing).reduce((sum, [, value]) => sum + value, 0);

export const legend = (name) => h("span", { class: `key ${name}` }, TIMES[name] ?? name);

/** Where a step's time goes on one machine; `longest` ms are as long as the bar can be. */
export function timeBar(timing, longest) {
  const label = `${timesOf(timing).map(([name, value]) => `${TIMES[name]} ${ms(value)}`).join(" · ")} ms`;
  const pieces = timesOf(timing).map(([name, value]) => h("span", { class: name, grow: value / longest }));
  return [h("div", { class: "bar time", role: "img", "aria-label": label }, pieces), quiet(label)];
}

function quantile(sorted, q) {
  const at = q * (sorted.length - 1);
  const low = sorted[Math.floor(at)];
  return low + (sorted[Math.ceil(at)] - low) * (at % 1);
}

/** The latest steps' times as a line. */
export function plot(values) {
  const shown = values.slice(-PLOTTED_STEPS);
  const sorted = [...shown].sort((a, b) => a - b);
  const [p50, p99, slowest] = [0.5, 0.99, 1].map((q) => quantile(sorted, q));
  const top = Math.min(slowest, 2 * p99) * 1.08; // a rare outlier leaves the picture, not its scale
  const y = (value) => (100 * (1 - value / top)).toFixed(2);
  const points = shown.map((value, index) => `${((1000 * index) / Math.max(1, shown.length - 1)).toFixed(1)},${y(value)}`);
  const level = (value, name) => svg("line", { x1: 0, x2: 1000, y1: y(value), y2: y(value), class: name });
  const caption = `half take at most ${ms(p50)} ms, 99 of 100 at most ${ms(p99)} ms, the slowest ${ms(slowest)} ms`;
  const box = { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": caption };
  return h(
    "figure",
    { class: "plot" },
    h("figcaption", { class: "row" }, h("span", {}, `Time of the last ${plural(shown.length, "step")}`), h("span", { class: "quiet" }, caption)),
    svg("svg", box, level(p50, "p50"), level(p99, "p99"), svg("polyline", { points: points.join(" ") })),
    h("p", { class: "quiet axis" },
      h("span", {}, `0 to ${ms(top)} ms${top < slowest ? ", what is slower is cut off" : ""}`),
      h("span", { class: "key p50" }, "half"), h("span", { class: "key p99" }, "99 of 100")),
  );
}

/** The latest steps side by side, on every machine: what it did in the time of each. */
export function timeline(ranks) {
  const known = ranks.filter(({ steps }) => steps?.compute_ms.length);
  if (!known.length) return false;
  const last = Math.min(...known.map(({ steps }) => steps.first + steps.compute_ms.length));
  const first = Math.max(last - TIMELINE_STEPS, ...known.map(({ steps }) => steps.first));
  const count = last - first;
  if (count < 2) return false;
  const parts = known.map(({ steps }) =>
    Object.keys(TIMES).map((name) => steps[`${name}_ms`].slice(first - steps.first, last - steps.first)));
  const totals = parts.map((own) => own[0].map((_, at) => own.reduce((sum, values) => sum + values[at], 0)));
  const sorted = totals.flat().sort((a, b) => a - b);
  const top = Math.min(sorted.at(-1), 3 * quantile(sorted, 0.5)); // what was rarely slow is cut off, not the scale of all
  const wide = 1000 / TIMELINE_STEPS;
  const strip = (own, row) => Object.keys(TIMES).map((name, part) => {
    const bars = own[part].map((value, at) => {
      const below = own.slice(0, part).reduce((sum, values) => sum + values[at], 0);
      const [low, high] = [below, below + value].map((each) => Math.min(1, each / top) * (STRIP - 3));
      const [x, y] = [(at * wide).toFixed(1), ((row + 1) * STRIP - high).toFixed(2)];
      return `M${x},${y}h${(0.8 * wide).toFixed(1)}v${(high - low).toFixed(2)}h-${(0.8 * wide).toFixed(1)}z`;
    });
    return svg("path", { class: name, d: bars.join("") });
  });
  const label = `What each machine did in the time of the last ${plural(count, "step")}; a step took up to ${ms(sorted.at(-1))} ms`;
  const height = STRIP * known.length;
  return h(
    "figure",
    { class: "timeline" },
    h("figcaption", { class: "row" },
      h("span", {}, `The last ${plural(count, "step")}, one by one`),
      h("span", { class: "legend" }, Object.keys(TIMES).map(legend))),
    h("div", { class: "strips" },
      h("ul", {}, known.map(({ node }) => h("li", { class: "quiet" }, h("span", { class: `swatch ${colour(node)}` }), node))),
      svg("svg", { viewBox: `0 0 1000 ${height}`, height, preserveAspectRatio: "none", role: "img", "aria-label": label }, parts.map(strip))),
    quiet(`Oldest on the left; the strips are ${ms(top)} ms high${top < sorted.at(-1) ? ", what is slower is cut off" : ""}.`),
  );
}
