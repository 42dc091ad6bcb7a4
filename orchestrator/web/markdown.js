// Markdown as models write it, made into elements. Whatever a text says, it becomes elements of this list and text.

import { h } from "./common.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const CELLS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 8; // lists and quotes in each other; further ones are text

/** The blocks of a text, as elements. */
export const markdown = (text) => blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);

function blocks(lines, depth) {
  const made = [];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    const next = (taken, element) => { made.push(element); at += taken; };
    let found;
    if (!line.trim()) at += 1;
    else if ((found = line.match(FENCE))) next(...code(lines, at, found));
    else if ((found = line.match(HEADING))) next(1, h(`h${Math.min(6, found[1].length + 3)}`, {}, inline(found[2])));
    else if (RULE.test(line)) next(1, h("hr"));
    else if (depth < DEEPEST && /^ {0,3}>/.test(line)) next(...quote(lines, at, depth));
    else if (depth < DEEPEST && ITEM.test(line)) next(...list(lines, at, depth));
    else if (line.includes("|") && CELLS.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) next(...table(lines, at));
    else next(...paragraph(lines, at, depth));
  }
  return made;
}

function code(lines, at, [, indent, fence, language]) {
  const body = [];
  let end = at + 1;
  const closes = (line) => line.trim().startsWith(fence[0].repeat(fence.length)) && !line.trim().replaceAll(fence[0], "");
  while (end < lines.length && !closes(lines[end])) {
    const line = lines[end];
    body.push(line.startsWith(indent) ? line.slice(indent.length) : line);
    end += 1;
  }
  const told = language ? { "data-language": language } : {};
  return [end + 1 - at, h("pre", { tabindex: 0, ...told }, h("code", {}, body.join("\n")))];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  return [end - at, h("blockquote", {}, blocks(lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, "")), depth + 1))];
}

/** A list: its items are what stands at its own depth; what is indented further belongs to the item before it. */
function list(lines, at, depth) {
  const [, first, mark] = lines[at].match(ITEM);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    const item = line.match(ITEM);
    const begins = item && item[1].length <= first.length + 1 && /\d/.test(item[2]) === ordered && !RULE.test(line);
    const deeper = line.search(/\S/) > first.length + 1;
    const indent = (each) => /^\s*/.exec(each)[0].length;
    const next = lines[end + 1] ?? "";
    const gap = !line.trim() && next.trim() && (indent(next) > first.length + 1 || ITEM.test(next)); // between items, or in one
    const goesOn = line.trim() && items.length && (deeper || (lines[end - 1].trim() && !item && !HEADING.test(line) && !FENCE.test(line)));
    if (begins) items.push({ width: item[1].length + item[2].length + 1, lines: [item[4]] });
    else if (goesOn) items.at(-1).lines.push(deeper ? line.slice(Math.min(items.at(-1).width, indent(line))) : line);
    else if (gap) items.at(-1).lines.push("");
    else break;
    end += 1;
  }
  const start = ordered && Number.parseInt(mark, 10) !== 1 ? { start: Number.parseInt(mark, 10) } : {};
  const content = ({ lines: own }) => {
    const [head, ...rest] = blocks(own, depth + 1);
    return head?.nodeName === "P" ? [...head.childNodes, ...rest] : [head, ...rest]; // of a tight list
  };
  return [end - at, h(ordered ? "ol" : "ul", start, items.map((item) => h("li", {}, content(item))))];
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const head = cells(lines[at]);
  const row = (line) => h("tr", {}, head.map((_, index) => h("td", {}, inline(cells(line)[index] ?? ""))));
  return [end - at, h("div", { class: "scroll", tabindex: 0 }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, inline(cell))))),
    h("tbody", {}, lines.slice(at + 2, end).map(row))))];
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  const begins = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || (depth < DEEPEST && (/^ {0,3}>/.test(line) || ITEM.test(line)));
  while (end < lines.length && lines[end].trim() && !begins(lines[end])) end += 1;
  return [end - at, h("p", {}, inline(lines.slice(at, end).map((line) => line.trim()).join("\n")))];
}

// ---------------------------------------------------------------- within a line

const WITHIN = [
  [/\\([\\`*_{}[\]()#+.!|~>-])/, ([, char]) => char],
  [/(`+)(?!`)([^]*?[^`])\1(?!`)/, ([, , text]) => h("code", {}, text.replace(/^ (.+) $/, "$1"))],
  [/\*\*(?=\S)([^]*?\S)\*\*(?!\*)/, ([, text], deep) => h("strong", {}, inline(text, deep))],
  [/(?<!\w)__(?=\S)([^]*?\S)__(?!\w)/, ([, text], deep) => h("strong", {}, inline(text, deep))],
  [/~~(?=\S)([^]*?\S)~~/, ([, text], deep) => h("del", {}, inline(text, deep))],
  [/\*(?=[^\s*])([^*]*?[^\s*])\*(?!\*)/, ([, text], deep) => h("em", {}, inline(text, deep))],
  [/(?<!\w)_(?=[^\s_])([^_]*?[^\s_])_(?!\w)/, ([, text], deep) => h("em", {}, inline(text, deep))],
  [/!?\[([^\]]*)\]\(\s*<?((?:[^\s<>()]|\([^\s()<>]*\))*)>?(?:\s+"[^"]*")?\s*\)/, ([all, text, url], deep) => link(url, text, deep) ?? all],
  [/<?(https?:\/\/[^\s<>]*[^\s<>.,;:!?"')\]}])>?/, ([all, url]) => link(url, url, 99) ?? all],
  [/\n/, () => h("br")],
];

/** What may be followed: pages and mail. Nothing is loaded of it, images neither. */
function link(url, text, deep) {
  if (!/^(https?:\/\/|mailto:)/i.test(url)) return null;
  return h("a", { href: url, rel: "noopener noreferrer nofollow", target: "_blank" }, deep < 99 ? inline(text || url, deep) : text);
}

/** The pieces of a line: text and elements. */
function inline(text, deep = 0) {
  if (deep > DEEPEST) return [text];
  const made = [];
  for (let rest = text; rest;) {
    let best = null;
    for (const [pattern, make] of WITHIN) {
      const found = rest.match(pattern);
      if (found && (best === null || found.index < best.found.index)) best = { found, make };
    }
    if (best === null) return [...made, rest];
    const { found, make } = best;
    if (found.index) made.push(rest.slice(0, found.index));
    made.push(make(found, deep + 1));
    rest = rest.slice(found.index + found[0].length);
  }
  return made;
}
