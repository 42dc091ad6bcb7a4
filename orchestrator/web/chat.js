// A conversation with one of the models that are ready, streamed.

import { $, ApiError, call, h, joined, ms, plural, words } from "./common.js";

const { prompt, temperature, max_tokens: maxTokens } = $("ask").elements;
const log = $("log");
const messages = [];
const SAY = prompt.placeholder;
const CONTINUE = "A text for the model to continue: it has no chat template. Enter sends, Shift+Enter breaks the line.";
const RATE_MS = 500; // pieces that came within less say nothing about a rate
let answering = null; // the AbortController of the answer under way
let chats = new Map(); // by name of a model that is ready: whether it knows roles, or only continues texts

export function drawModels(sessions) {
  chats = new Map(sessions.filter(({ state }) => state === "ready").map((session) => [session.name, session.chats]));
  const names = [...chats.keys()];
  const select = $("chat-model");
  const chosen = select.value;
  const shown = names.length ? names : ["no model is ready"];
  if (shown.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    select.replaceChildren(...shown.map((name) => h("option", {}, name)));
    if (names.includes(chosen)) select.value = chosen;
  }
  select.disabled = $("send").disabled = !names.length;
  prompt.placeholder = chats.get(select.value) === false ? CONTINUE : SAY;
}

/** The events of an answer; throws ApiError where it breaks off. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("The answer broke off: the orchestrator closed the connection.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // a comment, which keeps the connection alive
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message);
      yield event;
    }
  }
}

/** How fast an answer comes. At its end the orchestrator tells its tokens and the mean of `each`, in ms; until then
 * its pieces stand in for them. */
function pace({ most, began, first, last, pieces, tokens, each, finish }) {
  if (!first && tokens === undefined) return "…";
  const counted = tokens !== undefined;
  const mean = counted ? each : last - first >= RATE_MS && (last - first) / (pieces - 1);
  const rate = mean && `${(1000 / mean).toFixed(mean > 100 ? 1 : 0)} tokens/s`;
  const after = first && `first after ${ms(first - began)} ms`;
  const cut = finish === "length" && (most ? "cut at max tokens" : "the context is full");
  return joined(`${counted ? "" : "about "}${plural(counted ? tokens : pieces, "token")}`, rate, after, cut);
}

/** A conversation as one text, for a model that only continues: each question on a line of its own. */
function asText(conversation) {
  const breaks = (text, role) => role === "user" && text && !text.endsWith("\n");
  return conversation.reduce((text, { role, content }) => text + (breaks(text, role) ? "\n" : "") + content, "");
}

function entry(who, name, text) {
  const thought = h("p", { class: "thought" });
  const [said, note] = [h("p", { class: "words" }, text), h("p", { class: "quiet" })];
  log.append(h("div", { class: who }, h("h3", {}, name), thought, said, note));
  log.scrollTop = log.scrollHeight;
  return { thought, said, note };
}

/** Stream an answer into an entry of the log. */
async function stream(path, body, { thought, said, note }) {
  const progress = { most: body.max_tokens, began: performance.now(), pieces: 0 };
  try {
    const response = await call(path, { method: "POST", body, signal: answering.signal });
    for await (const { choices: [choice], usage, timings } of events(response)) {
      const piece = choice?.text ?? choice?.delta?.content ?? "";
      const musing = choice?.delta?.reasoning_content ?? "";
      if (piece || musing) {
        progress.last = performance.now();
        progress.first ??= progress.last;
        progress.pieces += 1;
      }
      progress.finish = choice?.finish_reason ?? progress.finish;
      progress.each = timings?.ms_per_token ?? progress.each;
      progress.tokens = usage?.completion_tokens;
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      thought.append(musing);
      said.append(piece);
      note.textContent = pace(progress);
      if (atEnd) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    const stopped = error.name === "AbortError";
    note.className = stopped ? "quiet" : "failure";
    note.textContent = stopped ? joined("stopped", progress.first && pace(progress)) : words(error);
  }
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (answering || $("send").disabled) return;
  const question = { role: "user", content: prompt.value };
  const model = $("chat-model").value;
  const conversation = [...messages, question];
  const [path, input] = chats.get(model)
    ? ["v1/chat/completions", { messages: conversation }]
    : ["v1/completions", { prompt: asText(conversation) }];
  const body = {
    model,
    ...input,
    temperature: temperature.valueAsNumber,
    max_tokens: maxTokens.value ? maxTokens.valueAsNumber : null, // null: until the context is full
    stream: true,
    stream_options: { include_usage: true },
  };
  prompt.value = "";
  entry("user", "You", question.content);
  const shown = entry("assistant", body.model, "");
  answering = new AbortController();
  swap($("send"), $("stop"));
  await stream(path, body, shown);
  answering = null;
  swap($("stop"), $("send"));
  const content = shown.said.textContent;
  if (!shown.said.isConnected) return; // cleared meanwhile
  if (content) messages.push(question, { role: "assistant", content });
  else prompt.value ||= question.content; // nothing came of it: to be sent again
});

/** Show one button in place of another; the focus goes with it. */
function swap(from, to) {
  log.ariaBusy = to === $("stop"); // read out when it is complete
  to.hidden = false;
  if (document.activeElement === from) to.focus();
  from.hidden = true;
}

prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (prompt.value.trim()) $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => answering?.abort());
$("chat-clear").addEventListener("click", () => {
  answering?.abort();
  messages.length = 0;
  log.replaceChildren();
});
