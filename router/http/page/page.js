// The live page: reads frames from the router, hands them to the lifts and panels, paints when the browser does.
import { events, headers, reason } from "./calls.js";
import { Lift } from "./lift.js";
import { openStory } from "./story.js";
import { startRides } from "./ride.js";
import { RateLine, showHistogram, showQueue } from "./panels.js";

const $ = (id) => document.getElementById(id);
const TABLE_ROWS = 64;
const lifts = new Map();      // by executor
const rate = new RateLine($("rate-line"));
let isFrozen = false, isDirty = false, myRequests = new Set();

// --- frames ---------------------------------------------------------------------------------------------

async function follow() {
  for (let wait = 500; ; wait = Math.min(wait * 2, 5000)) {
    try {
      const response = await fetch("/live", { headers: headers() });
      if (!response.ok) throw new Error(await reason(response));
      wait = 500;
      setState("watching", "good");
      for await (const data of events(response)) for (const frame of JSON.parse(data)) take(frame);
      setState("the router has closed the stream", "bad");
    } catch (error) {
      setState(error instanceof TypeError ? "the router is away" : error.message, "bad");
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

function take(frame) {
  if (frame.stats) return takeStats(frame.stats);
  if (frame.missed) return;
  const shown = lifts.get(frame.executor) ?? addLift(frame.executor);
  for (const column of shown.lift.take(frame)) rate.add(column.sampled);
  shown.frame = frame;
  isDirty = true;
}

function takeStats(stats) {
  showHistogram($("ttft"), $("ttft-shares"), stats.time_to_first_token);
  showHistogram($("itl"), $("itl-shares"), stats.inter_token);
  setState(stats.refusal ? `not serving: ${stats.refusal}` : "serving", stats.refusal ? "bad" : "good");
}

function setState(text, kind) {
  const state = $("state");
  if (state.textContent !== text) state.textContent = text;
  state.className = `state ${kind}`;
}

// --- lifts ----------------------------------------------------------------------------------------------

function addLift(executor) {
  const section = $("lift").content.cloneNode(true).querySelector("section");
  const canvas = section.querySelector("canvas"), tip = section.querySelector(".tip");
  section.dataset.executor = executor;
  $("lifts").insertBefore(section, [...$("lifts").children].find((other) => other.dataset.executor > executor) ?? null);
  $("nobody").hidden = true;
  const shown = { section, lift: new Lift(canvas), frame: null, number: 0 };
  const under = (event) => shown.lift.at(event.offsetX, event.offsetY);
  canvas.addEventListener("pointermove", (event) => {
    const found = under(event);
    tip.hidden = !found;
    if (!found) return;
    tip.textContent = `${found.rider.name}${found.rider.tenant && `, of ${found.rider.tenant}`}, step ${found.step}`;
    const x = Math.min(event.offsetX + 14, canvas.clientWidth - tip.offsetWidth - 4);
    tip.style.transform = `translate(${Math.max(0, x)}px, ${Math.max(0, event.offsetY - 30)}px)`;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("click", (event) => { const found = under(event); if (found) openStory(found.rider); });
  lifts.set(executor, shown);
  for (const [i, one] of [...$("lifts").children].entries()) {  // by their order, so that seats can be told apart
    const { number } = Object.assign(lifts.get(one.dataset.executor), { number: i + 1 });
    one.querySelector("h2").textContent = lifts.size > 1 ? `${number} · ${one.dataset.executor}` : executor;
  }
  return shown;
}

const milliseconds = (us) => us >= 100_000 ? `${(us / 1000).toFixed(0)} ms` : `${(us / 1000).toFixed(1)} ms`;

function showNumbers() {
  const frames = [...lifts.values()].map((shown) => shown.frame);
  if (!frames.length) return;
  const newest = frames.reduce((a, b) => a.time > b.time ? a : b);
  const longest = (of) => Math.max(...frames.map(of));
  $("rate").textContent = rate.perSecond().toFixed(0);
  $("running").textContent = frames.reduce((sum, frame) => sum + frame.running, 0);
  $("waiting").textContent = newest.waiting;
  $("step-time").textContent = milliseconds(longest((frame) => frame.step_us));
  $("idle").textContent = milliseconds(longest((frame) => frame.idle_us));
  $("waiting-count").textContent = newest.waiting || "";
  showQueue($("queue"), $("queue-empty"), newest.groups);
  for (const { section, lift, frame } of lifts.values()) showLift(section, lift, frame);
}

function showLift(section, lift, frame) {
  section.querySelector(".figures").textContent =
    `step ${frame.step} · ${frame.running} of ${frame.seats} seats · ${milliseconds(frame.step_us)} a step, ${milliseconds(frame.idle_us)} idle before · plan ${frame.plan_bytes} bytes`;
  const owned = frame.blocks - frame.free, share = (count) => `${100 * count / Math.max(1, frame.blocks)}%`;
  section.querySelector(".owned").style.width = share(owned);
  section.querySelector(".cached").style.width = share(frame.cached);
  section.querySelector(".free").style.width = share(frame.free - frame.cached);
  const words = `KV blocks: ${owned} owned, ${frame.cached} cached, ${frame.free - frame.cached} free`;
  section.querySelector(".blocks p").textContent = words;
  section.querySelector(".bar").setAttribute("aria-label", words);
  lift.canvas.setAttribute("aria-label", `Executor ${frame.executor}, step ${frame.step}: ${frame.running} of ${frame.seats} seats taken. The table of requests below says the same in words.`);
}

function showTable() {
  const riders = [...lifts.values()].flatMap(({ lift, number }) => [...lift.riders.values()].map((rider) => ({ rider, lift, number }))).filter(({ rider }) => !rider.isPadding);
  $("riders-count").textContent = riders.length || "";
  riders.sort((a, b) => myRequests.has(b.rider.requestId) - myRequests.has(a.rider.requestId) || a.number - b.number);
  const body = $("on-lift"), wanted = riders.slice(0, TABLE_ROWS);
  const rows = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  wanted.forEach(({ rider, lift, number }, place) => {
    const key = `${rider.seqId} ${rider.name}`;
    let row = rows.get(key);
    rows.delete(key);
    if (!row) {
      row = document.createElement("tr");
      row.dataset.key = key;
      row.dataset.request = rider.requestId;
      for (let i = 0; i < 4; i += 1) row.insertCell();
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = rider.shortName;
      button.title = `The story of ${rider.requestId}${rider.tenant && `, of ${rider.tenant}`}`;
      button.style.setProperty("--rider", lift.look?.colours[rider.colour] ?? "currentColor");
      button.addEventListener("click", () => openStory(rider));
      row.cells[0].append(button);
    }
    row.querySelector("button").classList.toggle("mine", myRequests.has(rider.requestId));
    [lifts.size > 1 ? `${number} · ${rider.seat + 1}` : rider.seat + 1, rider.steps, rider.now].forEach((value, i) => {
      if (row.cells[i + 1].textContent !== String(value)) row.cells[i + 1].textContent = value;
    });
    if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] ?? null);
  });
  for (const row of rows.values()) if (!row.contains(document.activeElement)) row.remove();
}

// --- time -----------------------------------------------------------------------------------------------

let lastWords = 0;
function tick(now) {
  requestAnimationFrame(tick);
  if (isFrozen) return;
  for (const { lift } of lifts.values()) lift.paint();
  if (now - lastWords < 200) return;
  lastWords = now;
  rate.paint();
  $("rate").textContent = rate.perSecond().toFixed(0);
  if (!isDirty) return;
  isDirty = false;
  showNumbers();
  showTable();
}

function freeze() {
  isFrozen = !isFrozen;
  $("freeze").setAttribute("aria-pressed", isFrozen);
  $("freeze").textContent = isFrozen ? "Go on" : "Freeze";
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  for (const { lift } of lifts.values()) lift.isStale = true;
}

$("freeze").addEventListener("click", freeze);
document.addEventListener("keydown", (event) => {
  if (event.key === " " && event.target === document.body) { event.preventDefault(); freeze(); }
});
$("theme").value = localStorage.getItem("theme") ?? "auto";
setTheme($("theme").value);
$("theme").addEventListener("change", (event) => { localStorage.setItem("theme", event.target.value); setTheme(event.target.value); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme($("theme").value));
$("key-form").addEventListener("submit", (event) => event.preventDefault());
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", (event) => sessionStorage.setItem("key", event.target.value));

startRides({ onRequest: (requestId) => { myRequests.add(requestId); isDirty = true; } });
fetch("/v1/models", { headers: headers() }).then((response) => response.json()).then((list) => { $("model").textContent = list.data[0].id; }).catch(() => {});
follow();
requestAnimationFrame(tick);
