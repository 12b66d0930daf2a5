// The small pictures: tokens a second, who waits, how long clients wait.

const WINDOW_SECONDS = 60, BIN_SECONDS = 0.5;

export class RateLine {
  constructor(canvas) {
    this.canvas = canvas;
    this.bins = new Array(WINDOW_SECONDS / BIN_SECONDS).fill(0);
    this.bin = Math.floor(performance.now() / 1000 / BIN_SECONDS);
  }
  turn() {
    const bin = Math.floor(performance.now() / 1000 / BIN_SECONDS);
    for (; this.bin < bin; this.bin += 1) { this.bins.shift(); this.bins.push(0); }
  }
  add(count) { this.turn(); this.bins[this.bins.length - 1] += count; }
  perSecond() {
    this.turn();
    const whole = this.bins.slice(-5, -1);
    return whole.reduce((sum, count) => sum + count, 0) / (whole.length * BIN_SECONDS);
  }
  paint() {
    this.turn();
    const { canvas, bins } = this, scale = window.devicePixelRatio || 1, c = canvas.getContext("2d");
    const width = canvas.width = Math.max(1, Math.round(canvas.clientWidth * scale)), height = canvas.height = Math.round(56 * scale);
    const most = Math.max(1, ...bins), step = width / (bins.length - 2);
    c.strokeStyle = c.fillStyle = getComputedStyle(canvas).getPropertyValue("--accent");
    c.lineWidth = 2 * scale;
    c.lineJoin = "round";
    c.beginPath();
    bins.slice(0, -1).forEach((count, i) => c.lineTo(i * step, height - 2 * scale - (height - 6 * scale) * count / most));
    c.stroke();
    c.lineTo(width, height); c.lineTo(0, height);
    c.globalAlpha = 0.12;
    c.fill();
    canvas.setAttribute("aria-label", `Tokens a second over the last minute, at most ${(most / BIN_SECONDS).toFixed(0)}`);
  }
}

function line(kind, label, share, value) {
  const row = document.createElement(kind), bar = document.createElement("i"), track = document.createElement("span");
  const name = document.createElement("b"), number = document.createElement("span");
  row.className = "line";
  track.className = "track";
  bar.style.width = `${100 * share}%`;
  name.textContent = label;
  name.title = label;
  number.textContent = value;
  track.append(bar);
  row.append(name, track, number);
  return row;
}

export function showQueue(list, empty, groups) {
  empty.hidden = groups.length > 0;
  const most = Math.max(1, ...groups.map(([, , count]) => count));
  const rows = [...groups].sort((a, b) => a[0] - b[0]).slice(0, 12);
  list.replaceChildren(...rows.map(([priority, tenant, count]) => line("li", tenant ? `${tenant}, class ${priority}` : `class ${priority}`, count / most, count)));
}

const bound = (seconds) => seconds < 1 ? `${+(seconds * 1000).toPrecision(3)} ms` : `${seconds} s`;

// The buckets that have something, and one more on either side; in `shares`, within what half and 99 of 100 lie.
export function showHistogram(box, shares, { bounds, counts }) {
  const key = counts.join();
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  const total = counts.reduce((sum, count) => sum + count, 0), most = Math.max(1, ...counts);
  const label = (i) => i < bounds.length ? `≤ ${bound(bounds[i])}` : `> ${bound(bounds.at(-1))}`;
  const within = (share) => { let sum = 0; return label(counts.findIndex((count) => (sum += count) >= share * total)); };
  shares.textContent = total ? `half ${within(0.5)}, 99 % ${within(0.99)}` : "no token yet";
  const first = counts.findIndex((count) => count > 0) - 1, last = counts.findLastIndex((count) => count > 0) + 1;
  const percent = (count) => count ? `${(100 * count / total).toFixed(count < total / 100 ? 1 : 0)} %` : "";
  const rows = counts.map((count, i) => i < first || i > last ? null : line("div", label(i), count / most, percent(count)));
  box.replaceChildren(...rows.filter((row) => row && total));
}
