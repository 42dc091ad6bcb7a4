// A conversation with one of the models that are ready, streamed.

import { $, ApiError, call, h, joined, ms, plural, words } from "./common.js";

const { prompt, temperature, max_tokens: maxTokens } = $("ask").elements;
const log = $("log");
const messages = [];
let answering = null; // the AbortController of the answer under way

export function drawModels(sessions) {
  const names = sessions.filter((session) => session.state === "ready").map((session) => session.name);
  const select = $("chat-model");
  const chosen = select.value;
  const shown = names.length ? names : ["no model is ready"];
  if (shown.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    select.replaceChildren(...shown.map((name) => h("option", {}, name)));
    if (names.includes(chosen)) select.value = chosen;
  }
  select.disabled = $("send").disabled = !names.length;
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
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message);
      yield event;
    }
  }
}

/** How fast an answer comes. Its pieces stand in for its tokens until these have been counted. */
function pace({ began, first, last, pieces, tokens, finish }) {
  if (!first) return "…";
  const count = tokens ?? pieces;
  const rate = count > 1 && `${tokens ? "" : "about "}${Math.round((1000 * (count - 1)) / (last - first))} tokens/s`;
  const cut = finish === "length" && "cut at max tokens";
  return joined(plural(count, "token"), rate, `first after ${ms(first - began)} ms`, cut);
}

function entry(who, name, text) {
  const [said, note] = [h("p", { class: "words" }, text), h("p", { class: "quiet" })];
  log.append(h("div", { class: who }, h("h3", {}, name), said, note));
  log.scrollTop = log.scrollHeight;
  return { said, note };
}

/** Stream an answer into an entry of the log. */
async function stream(body, { said, note }) {
  const progress = { began: performance.now(), pieces: 0 };
  try {
    const response = await call("v1/chat/completions", { method: "POST", body, signal: answering.signal });
    for await (const { choices: [choice], usage } of events(response)) {
      if (choice?.delta.content) {
        progress.last = performance.now();
        progress.first ??= progress.last;
        progress.pieces += 1;
      }
      progress.finish = choice?.finish_reason ?? progress.finish;
      progress.tokens = usage?.completion_tokens;
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      said.append(choice?.delta.content ?? "");
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
  const body = {
    model: $("chat-model").value,
    messages: [...messages, question],
    temperature: temperature.valueAsNumber,
    max_tokens: maxTokens.valueAsNumber,
    stream: true,
    stream_options: { include_usage: true },
  };
  prompt.value = "";
  entry("user", "You", question.content);
  const shown = entry("assistant", body.model, "");
  answering = new AbortController();
  swap($("send"), $("stop"));
  await stream(body, shown);
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
