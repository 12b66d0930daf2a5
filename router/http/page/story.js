// One request's time line: where its time went, with reasons, in a dialog.
import { headers, reason } from "./calls.js";

const $ = (id) => document.getElementById(id);
const seconds = (value) => value < 1 ? `${(value * 1000).toFixed(1)} ms` : `${value.toFixed(2)} s`;
const words = (code) => code.replaceAll("_", " ");

$("story-close").addEventListener("click", () => $("story").close());

export async function openStory({ requestId, tenant = "" }) {
  const dialog = $("story"), list = $("story-line");
  $("story-title").textContent = requestId;
  $("story-sum").textContent = "asking the scheduler";
  list.replaceChildren();
  if (!dialog.open) dialog.showModal();
  const whose = tenant && `?tenant=${encodeURIComponent(tenant)}`;
  const response = await fetch(`/live/requests/${encodeURIComponent(requestId)}${whose}`, { headers: headers() }).catch(() => null);
  if ($("story-title").textContent !== requestId) return;
  if (!response?.ok) {
    $("story-sum").textContent = response ? await reason(response) : "the router is away";
    return;
  }
  const { entries } = await response.json();
  const choices = new Set(entries.map((entry) => entry.index)).size;
  const end = Math.max(0, ...entries.map((entry) => entry.start + entry.duration));
  $("story-sum").textContent = `${seconds(end)} in all, ${choices} ${choices === 1 ? "choice" : "choices"}; every moment has a reason`;
  list.replaceChildren(...entries.map((entry) => item(entry, end, choices)));
}

function item(entry, end, choices) {
  const row = document.createElement("li"), time = document.createElement("time"), text = document.createElement("div");
  const name = document.createElement("b"), track = document.createElement("div"), bar = document.createElement("i");
  time.textContent = seconds(entry.duration);
  name.textContent = words(entry.reason);
  text.append(name, ` ${choices > 1 ? `(choice ${entry.index}) ` : ""}${entry.detail}${entry.step ? `, from step ${entry.step}` : ""}`);
  track.className = "track";
  bar.style.marginLeft = `${100 * entry.start / Math.max(end, 1e-9)}%`;
  bar.style.width = `${100 * entry.duration / Math.max(end, 1e-9)}%`;
  track.append(bar);
  text.append(track);
  row.append(time, text);
  return row;
}
