// The prompt box: sends a prompt, shows the answer as it comes, and tells the page which rows are its own.
import { events, headers, reason } from "./calls.js";

const $ = (id) => document.getElementById(id);

export function startRides({ onRequest }) {
  let ride = null;
  $("stop").addEventListener("click", () => ride?.abort());
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ride").requestSubmit();
  });
  $("ride").addEventListener("submit", async (event) => {
    event.preventDefault();
    ride?.abort();
    const mine = ride = new AbortController();
    $("stop").disabled = false;
    try {
      await go(mine.signal, onRequest);
    } catch (error) {
      $("ride-state").textContent = error.name === "AbortError" ? "stopped" : error instanceof TypeError ? "the router is away" : error.message;
    }
    if (ride === mine) $("stop").disabled = true;
  });
}

async function go(signal, onRequest) {
  const n = Number($("riders").value), texts = [];
  $("answer").replaceChildren();
  $("ride-state").textContent = "waiting for a seat";
  const began = performance.now();
  const body = { messages: [{ role: "user", content: $("prompt").value }], max_tokens: Number($("max-tokens").value), n, stream: true, stream_options: { include_usage: true } };
  const response = await fetch("/v1/chat/completions", {
    method: "POST", signal, headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error(await reason(response));
  const requestId = response.headers.get("x-request-id");
  if (requestId) onRequest(requestId);
  for (let i = 0; i < n; i += 1) {
    if (n > 1) {
      const title = document.createElement("h3");
      title.textContent = `Rider ${i}`;
      $("answer").append(title);
    }
    texts.push(document.createElement("div"));
    $("answer").append(texts[i]);
  }
  let first = 0, usage = null;
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices) {
      if (!choice.delta?.content) continue;
      if (!first) { first = performance.now() - began; $("ride-state").textContent = "riding"; }
      texts[choice.index].append(choice.delta.content);
    }
  }
  const took = (performance.now() - began) / 1000;
  $("ride-state").textContent = `${usage?.completion_tokens ?? "?"} tokens in ${took.toFixed(2)} s, first after ${first.toFixed(0)} ms`;
}
