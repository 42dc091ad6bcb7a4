// A conversation with one of the models that are ready, streamed.

import { $, ApiError, call, h, joined, later, morph, morphList, ms, plural, tell, words } from "./common.js";
import { markdown } from "./markdown.js";

const settings = $("ask").elements;
const { prompt, max_tokens: maxTokens } = settings;
const log = $("log");
const turns = []; // of the conversation: the question, the answer, and the entries that show them
const KEYS = matchMedia("(pointer: coarse)").matches ? "" : " Enter sends, Shift+Enter breaks the line.";
const SAY = `Message.${KEYS}`;
const CONTINUE = `A text for the model to continue: it was not trained to chat.${KEYS}`;
const SHOW_MS = 60; // between two looks of an answer that comes
const RATE_MS = 500; // pieces that came within less say nothing about a rate
const AWAY_MS = 120_000; // an orchestrator that goes in the middle of an answer may be away for so long
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"]; // sent where they are filled in
let answering = null; // the AbortController of the answer under way
let latest = []; // sessions that may be talked to, in whatever state
let chats = new Map(); // by name of a model that takes messages: its session, which says whether it knows roles or only continues texts

export function drawModels(sessions) {
  latest = sessions.filter(({ embeddings }) => !embeddings);
  chats = new Map(latest.filter(({ state }) => state === "ready" || state === "recovering").map((session) => [session.name, session]));
  drawChosen();
}

/** Offer the models that take messages. The one that was talked to stays chosen, whatever becomes of it: what is said next
 * is for no other. */
function drawChosen() {
  const select = $("chat-model");
  const names = [...chats.keys()];
  const model = select.value || names[0] || "";
  const session = chats.get(model) ?? latest.findLast(({ name }) => name === model);
  const ready = chats.has(model);
  const option = (name, text) => h("option", { "data-key": name, value: name }, text);
  const other = model ? `${model} (${session?.state ?? "not served"})` : "no model is ready";
  morphList(select, [...names.map((name) => option(name, name)), ...(ready ? [] : [option(model, other)])]);
  select.value = model;
  select.disabled = !names.length;
  $("send").disabled = $("again").disabled = !ready;
  tell($("chat-waits"), ready || !model ? "" : whyNot(model, session));
  log.dataset.empty = names.length ? "Nothing said yet." : "No model is ready yet: start one under “Models”.";
  prompt.placeholder = session?.chats === false ? CONTINUE : SAY;
}

/** Why a model takes no messages now. */
const whyNot = (model, session) =>
  session && !["failed", "closing"].includes(session.state)
    ? `${model} is not ready yet. Your message can be sent as soon as it is.`
    : `${model} is not served now. Choose another model, or start one under “Models”.`;

/** The events of one connection, each with its number; throws BrokeOff where it ends before the answer does. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new BrokeOff("The answer broke off: the orchestrator closed the connection.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const [, number, data] = part.match(/^(?:id: (\d+)\n)?data: (.*)$/) ?? [];
      if (data === undefined) continue; // a comment, which keeps the connection alive
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message);
      yield { number, event };
    }
  }
}

class BrokeOff extends Error {}

/** Whether an orchestrator that was just started may do better soon: it, or its machines, are not back yet. */
const passes = (error) =>
  error instanceof ApiError
    ? [404, 503].includes(error.status)
    : error instanceof BrokeOff || error instanceof TypeError; // which fetch throws where nobody answers

/** The events of an answer. Where the orchestrator goes in the middle, it is asked again until it is back, and the answer
 * goes on behind the last event that came; `away` is called meanwhile. */
async function* answered(path, body, signal, away) {
  const key = crypto.getRandomValues(new Uint32Array(4)).join("-");
  const headers = { "Idempotency-Key": key };
  for (let [begun, since, pause] = [false, null, 0]; ; ) {
    try {
      const response = await call(path, { method: "POST", body, signal, headers });
      for await (const { number, event } of events(response)) {
        if (number !== undefined) headers["Last-Event-ID"] = number;
        [begun, since, pause] = [true, null, 0];
        yield event;
      }
      return;
    } catch (error) {
      since ??= performance.now();
      if (!begun || !passes(error) || performance.now() - since > AWAY_MS) throw error;
    }
    away();
    pause = later(pause);
    await new Promise((done) => setTimeout(done, pause));
    signal.throwIfAborted();
  }
}

/** How fast an answer comes. At its end the orchestrator tells its tokens and the mean of `each`, in ms; until then
 * its pieces stand in for them. */
function pace({ most, full, began, first, last, pieces, tokens, each, finish }) {
  if (!first && tokens === undefined) return "…";
  const counted = tokens !== undefined;
  const mean = counted ? each : last - first >= RATE_MS && (last - first) / (pieces - 1);
  const rate = mean && `${(1000 / mean).toFixed(mean > 100 ? 1 : 0)} tokens/s`;
  const after = first && `first after ${ms(first - began)} ms`;
  const cut = finish === "length" && (most ? "cut at max tokens" : full ? "the context is full" : "cut at the model's own limit");
  return joined(`${counted ? "" : "about "}${plural(counted ? tokens : pieces, "token")}`, rate, after, cut);
}

/** A conversation as one text, for a model that only continues: each question on a line of its own. */
function asText(system, conversation) {
  const said = conversation.flatMap(({ question, answer }) => [question, answer]);
  return said.reduce((text, next, index) => {
    const breaks = index % 2 === 0 && text && !text.endsWith("\n");
    return text + (breaks ? "\n" : "") + next;
  }, system);
}

function asMessages(system, conversation) {
  const said = conversation.flatMap(({ question, answer }) => [
    { role: "user", content: question }, ...(answer === "" ? [] : [{ role: "assistant", content: answer }])]);
  return system ? [{ role: "system", content: system }, ...said] : said;
}

function entry(who, name, text) {
  const thought = h("p", { class: "thought" });
  const thinking = h("details", { class: "thinking", hidden: "" }, h("summary", { class: "quiet" }, "Thoughts"), thought);
  const [said, note] = [h("div", { class: "words" }, text), h("p", { class: "note quiet" })];
  const whole = h("div", { class: who }, h("h3", {}, name), thinking, said, note);
  log.append(whole);
  log.scrollTop = log.scrollHeight;
  return { whole, thinking, thought, said, note };
}

/** Change the log; whoever sees its end still does then. */
function change(how) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  how();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

/** Show what there is of an answer: what a chat says as markdown, what a text goes on with as it is. */
function show({ said, thinking, thought, formatted }, text, musing) {
  if (formatted) morph(said, h("div", { class: "words formatted" }, markdown(text)));
  else said.textContent = text;
  thinking.hidden = !musing;
  if (thought.textContent !== musing) thought.textContent = musing;
}

/** Stream an answer into an entry of the log; its text, as far as it came. */
async function stream(path, body, shown) {
  const noted = (said, failure) => change(() => {
    show(shown, text, musing);
    shown.note.className = failure ? "note failure" : "note quiet";
    shown.note.textContent = said;
  });
  const progress = { most: body.max_tokens, began: performance.now(), pieces: 0 };
  let [text, musing, due] = ["", "", 0];
  try {
    const away = () => noted("The orchestrator is away. The answer goes on when it is back.");
    for await (const { choices: [choice], usage, timings } of answered(path, body, answering.signal, away)) {
      const piece = choice?.text ?? choice?.delta?.content ?? "";
      const thought = choice?.delta?.reasoning_content ?? "";
      if (piece || thought) {
        progress.last = performance.now();
        progress.first ??= progress.last;
        progress.pieces += 1;
        text += piece;
        musing += thought;
        due ||= setTimeout(() => {
          due = 0;
          noted(pace(progress));
        }, SHOW_MS);
      }
      progress.finish = choice?.finish_reason ?? progress.finish;
      progress.each = timings?.ms_per_token ?? progress.each;
      progress.tokens = usage?.completion_tokens;
      progress.full = usage?.total_tokens >= chats.get(body.model)?.context;
    }
    clearTimeout(due);
    noted(pace(progress));
  } catch (error) {
    clearTimeout(due);
    if (error.name === "AbortError") noted(joined("stopped", progress.first && pace(progress)));
    else noted(words(error), true);
  }
  return text;
}

/** Have a question answered, behind all turns so far. */
async function answer(question) {
  const model = $("chat-model").value;
  const system = settings.system.value.trim();
  const conversation = [...turns, { question, answer: "" }];
  const chatting = chats.get(model)?.chats;
  const [path, input] = chatting
    ? ["v1/chat/completions", { messages: asMessages(system, conversation) }]
    : ["v1/completions", { prompt: asText(system && `${system}\n`, conversation) }];
  const filled = SAMPLING.filter((name) => settings[name].value).map((name) => [name, settings[name].valueAsNumber]);
  const body = {
    model,
    ...input,
    max_tokens: maxTokens.value ? maxTokens.valueAsNumber : null, // null: as the model's makers say
    ...Object.fromEntries(filled),
    stream: true,
    stream_options: { include_usage: true },
  };
  const asked = entry("user", "You", question);
  const shown = { ...entry("assistant", model, ""), formatted: chatting };
  answering = new AbortController();
  swap($("send"), $("stop"));
  $("again").hidden = true;
  const text = await stream(path, body, shown);
  answering = null;
  swap($("stop"), $("send"));
  if (!shown.whole.isConnected) return; // cleared meanwhile
  if (text) turns.push({ question, answer: text, shown: [asked.whole, shown.whole] });
  else prompt.value ||= question; // nothing came of it: to be sent again
  change(() => ($("again").hidden = !turns.length)); // which may take a row from the log
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answering || $("send").disabled) return;
  const question = prompt.value;
  prompt.value = "";
  answer(question);
});

$("again").addEventListener("click", () => {
  if (answering) return;
  const { question, shown } = turns.pop();
  while (shown[0].nextSibling) shown[0].nextSibling.remove(); // what failed behind it, too
  shown[0].remove();
  answer(question);
});

/** Show one button in place of another; the focus goes with it. */
function swap(from, to) {
  log.ariaBusy = to === $("stop"); // read out when it is complete
  to.hidden = false;
  if (document.activeElement === from) to.focus();
  from.hidden = true;
}

$("chat-model").addEventListener("change", drawChosen);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (prompt.value.trim()) $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => answering?.abort());
$("chat-clear").addEventListener("click", () => {
  answering?.abort();
  turns.length = 0;
  log.replaceChildren();
  $("again").hidden = true;
});
