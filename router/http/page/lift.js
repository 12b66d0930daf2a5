// One executor's batch as a moving picture: rows are seats, columns are iterations, a colour is a request.
//
// Only what is new is drawn: the picture moves to the left by whole columns and the newest are painted at its
// right edge. Columns are kept, so that it can be drawn again in another size or theme, and asked what is where.

const EMPTY = 0, DECODE = 1, PREFILL = 2, STILL = 3, PADDING = 4;
const ENTERED = 1, FINISHED = 2, PREEMPTED = 4, CANCELLED = 8;
const KEPT_COLUMNS = 1024;
const NUM_COLOURS = 36;

// Colours as a canvas takes them quickest: red, green and blue.
function resolved(colours) {
  const c = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  return colours.map((colour) => {
    c.fillStyle = colour;
    c.fillRect(0, 0, 1, 1);
    return `rgb(${c.getImageData(0, 0, 1, 1).data.slice(0, 3).join()})`;
  });
}

const markOf = (reason) => reason === "STOP" || reason === "LENGTH" ? FINISHED : reason === "PREEMPTED" ? PREEMPTED : CANCELLED;

export class Rider {
  constructor(seqId, requestId, index, isPadding, tenant, seat, colour) {
    Object.assign(this, { seqId, requestId, index, isPadding, tenant, seat, colour, steps: 0, now: "", isGone: false });
  }
  get name() { return this.index ? `${this.requestId} · ${this.index}` : this.requestId; }
  get shortName() {
    const id = this.requestId.length > 18 ? `${this.requestId.slice(0, 10)}…${this.requestId.slice(-5)}` : this.requestId;
    return this.index ? `${id} · ${this.index}` : id;
  }
}

export class Lift {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.riders = new Map();         // by seq_id
    this.seats = [];                 // rider or null
    this.columns = [];               // oldest first
    this.unpainted = 0;              // newest columns that are not on the canvas
    this.repaint = 0;                // how many of the columns before the newest have changed
    this.isStale = true;             // all of it must be painted again
    this.nextColour = 0;
    this.accepted = null;            // guessed tokens that were right, so far
    new ResizeObserver(() => { this.isStale = true; }).observe(canvas);
  }

  // --- what happens -------------------------------------------------------------------------------------

  // Several steps; of each only what it changed. Returns the columns that are new.
  take(frame) {
    if (frame.seats > this.seats.length) {
      while (this.seats.length < frame.seats) this.seats.push(null);
      this.isStale = true;
    }
    if (frame.seated) this.reseat(frame.seated);
    const columns = [];
    for (const step of frame.steps) {
      columns.push(this.takeStep(step));
      for (let i = 1; i <= (step.alike ?? 0); i += 1) columns.push(this.takeStep({ step: step.step + i, still: step.still }));
    }
    // Right guesses are tokens beside the one of each row. Those of before are no news, and an epoch begins at 0.
    const before = this.accepted ?? frame.accepted;
    if (columns.length) {
      columns[columns.length - 1].sampled += frame.accepted - (frame.accepted < before ? 0 : before);
      this.accepted = frame.accepted;
    }
    return columns;
  }

  takeStep(step) {
    for (const [seqId, reason] of step.left ?? []) this.leave(seqId, reason);
    const entered = new Set();
    for (const one of step.entered ?? []) entered.add(this.enter(one));
    const chunks = new Map([...step.prefill ?? [], ...step.last_chunk ?? []]);
    const still = new Set(step.still ?? []);
    const column = { step: step.step, riders: new Array(this.seats.length), kinds: new Uint8Array(this.seats.length), marks: new Uint8Array(this.seats.length), sampled: step.last_chunk?.length ?? 0 };
    for (const rider of this.riders.values()) {
      const sits = still.has(rider.seqId), chunk = chunks.get(rider.seqId);
      const kind = sits ? STILL : rider.isPadding ? PADDING : chunk ? PREFILL : DECODE;
      column.riders[rider.seat] = rider;
      column.kinds[rider.seat] = kind;
      column.sampled += kind === DECODE;
      if (entered.has(rider)) column.marks[rider.seat] = ENTERED;
      if (!sits) rider.steps += 1;
      rider.now = sits ? "sits still" : rider.isPadding ? "padding" : chunk ? `prefill, ${chunk} tokens` : "decode";
    }
    this.columns.push(column);
    this.unpainted += 1;
    if (this.columns.length > KEPT_COLUMNS) this.columns.splice(0, KEPT_COLUMNS / 4);
    return column;
  }

  enter([seqId, requestId, index, isPadding, tenant = ""]) {
    let seat = this.seats.indexOf(null);
    if (seat < 0) { seat = this.seats.length; this.seats.push(null); this.isStale = true; }
    const rider = new Rider(seqId, requestId, index, Boolean(isPadding), tenant, seat, this.colourOf(requestId, tenant));
    this.seats[seat] = rider;
    this.riders.set(seqId, rider);
    return rider;
  }

  // Choices of one request have its colour.
  colourOf(requestId, tenant) {
    for (const rider of this.riders.values()) if (rider.requestId === requestId && rider.tenant === tenant) return rider.colour;
    const colour = this.nextColour;
    this.nextColour = (this.nextColour + 1) % NUM_COLOURS;
    return colour;
  }

  leave(seqId, reason) {
    const rider = this.riders.get(seqId);
    if (!rider) return;
    this.riders.delete(seqId);
    this.seats[rider.seat] = null;
    rider.isGone = true;
    rider.now = reason.toLowerCase();
    // Told a step or two later: the mark belongs where the rider last moved, and nobody has sat there since.
    for (let back = 1; back <= this.columns.length; back += 1) {
      const column = this.columns.at(-back);
      if (column.riders[rider.seat] !== rider) break;
      this.repaint = Math.max(this.repaint, back);
      if (column.kinds[rider.seat] !== STILL || column.marks[rider.seat]) {
        if (!rider.isPadding) column.marks[rider.seat] |= markOf(reason);
        break;
      }
      column.kinds[rider.seat] = EMPTY;
      column.riders[rider.seat] = undefined;
    }
  }

  // Everybody on the lift, told at once; who sat there before keeps seat and colour.
  reseat(seated) {
    const known = new Set(seated.map(([seqId, requestId]) => `${seqId} ${requestId}`));
    for (const rider of [...this.riders.values()]) {
      if (!known.has(`${rider.seqId} ${rider.requestId}`)) {
        this.riders.delete(rider.seqId);
        this.seats[rider.seat] = null;
      }
    }
    for (const one of seated) if (!this.riders.has(one[0])) this.enter(one);
  }

  // --- the picture --------------------------------------------------------------------------------------

  layout() {
    const scale = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.round(this.canvas.clientWidth * scale));
    const rows = Math.max(this.seats.length, 1);
    const row = Math.max(Math.round(2 * scale), Math.min(Math.round(15 * scale), Math.floor(512 * scale / rows)));
    const height = rows * row;
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
      this.canvas.style.height = `${height / scale}px`;
    }
    const style = getComputedStyle(this.canvas);
    const value = (name) => style.getPropertyValue(name).trim();
    this.look = {
      row, column: Math.round((row >= 8 * scale ? 8 : 4) * scale), gap: row >= 5 * scale ? Math.max(1, Math.round(scale)) : 0,
      ground: value("--sunk"), surface: value("--surface"), ink: value("--ink"), bad: value("--bad"), warn: value("--warn"), muted: value("--line"),
      // Neighbours in order of arrival differ in hue by the golden angle, and in lightness too: for eyes that
      // tell few hues apart.
      colours: resolved(Array.from({ length: NUM_COLOURS }, (_, i) => `oklch(${parseFloat(value("--rider-l")) + (i % 3) * 7 - 7}% ${value("--rider-c")} ${(i * 137.508 + 245) % 360})`)),
      line: row >= 8 * scale ? Math.max(1, Math.round(scale)) : 0,
    };
  }

  paint() {
    if (!this.isStale && this.unpainted === 0) return;
    if (this.isStale) this.layout();
    const { context: c, canvas, look } = this;
    const fits = Math.ceil(canvas.width / look.column);
    let count = this.unpainted;
    if (this.isStale || count >= fits) {
      c.fillStyle = look.ground;
      c.fillRect(0, 0, canvas.width, canvas.height);
      count = Math.min(this.columns.length, fits);
    } else {
      c.drawImage(canvas, -count * look.column, 0);
      count = Math.min(count + this.repaint, this.columns.length, fits);
    }
    for (let i = 1; i <= count; i += 1) this.paintColumn(this.columns.at(-i), canvas.width - i * look.column);
    this.unpainted = this.repaint = 0;
    this.isStale = false;
  }

  paintColumn(column, x) {
    const { context: c, look } = this;
    const height = look.row - look.gap, width = look.column;
    c.fillStyle = look.ground;
    c.fillRect(x, 0, width, this.canvas.height);
    for (let seat = 0; seat < column.kinds.length; seat += 1) {
      const kind = column.kinds[seat], y = seat * look.row;
      if (kind === EMPTY) {
        if (look.line) { c.fillStyle = look.muted; c.fillRect(x, y + height - look.line, width, look.line); }
        continue;
      }
      const rider = column.riders[seat], mark = column.marks[seat];
      c.fillStyle = kind === PADDING ? look.muted : look.colours[rider.colour];
      if (!look.gap && kind === DECODE && !mark) {  // seats of one colour are one rectangle
        let end = seat + 1;
        while (column.kinds[end] === DECODE && !column.marks[end] && column.riders[end].colour === rider.colour) end += 1;
        c.fillRect(x, y, width, (end - seat) * look.row);
        seat = end - 1;
        continue;
      }
      if (kind === STILL) c.fillRect(x, y + (height >> 1), width, Math.max(1, height >> 3));
      else c.fillRect(x, y, width, height);
      if (kind === PREFILL) {  // hatched
        c.fillStyle = look.surface;
        const stripe = Math.max(1, width >> 2);
        for (let dy = 0; dy < height; dy += 1) c.fillRect(x + ((dy + width - stripe) % width), y + height - 1 - dy, stripe, 1);
      }
      if (!mark) continue;
      const edge = Math.max(1, width >> 2);
      if (mark & ENTERED) { c.fillStyle = look.ink; c.fillRect(x, y, edge, height); }
      if (mark & FINISHED) { c.fillStyle = look.ink; c.fillRect(x + width - edge - (edge >> 1), y, edge + (edge >> 1), height); }
      if (mark & CANCELLED) { c.fillStyle = look.bad; c.fillRect(x + width - edge - (edge >> 1), y, edge + (edge >> 1), height); }
      if (mark & PREEMPTED) {
        c.fillStyle = look.warn;
        c.beginPath(); c.moveTo(x, y); c.lineTo(x + width, y + height / 2); c.lineTo(x, y + height); c.fill();
      }
    }
  }

  // Which rider, and which step, lies at a place of the canvas (CSS pixels); null where nobody does.
  at(x, y) {
    if (!this.look) return null;
    const scale = this.canvas.width / Math.max(1, this.canvas.clientWidth);
    const back = Math.ceil((this.canvas.width - x * scale) / this.look.column);
    const column = this.columns.at(-Math.max(1, back));
    const rider = column?.riders[Math.floor(y * scale / this.look.row)];
    return rider ? { rider, step: column.step } : null;
  }
}
