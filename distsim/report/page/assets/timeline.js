// The timeline of a step on a canvas: drag to pan; buttons, keys, two fingers, or the wheel with Ctrl to zoom.

const ROW = 30, AXIS = 24;

class Timeline {
  constructor(timeline, path, step) {
    Object.assign(this, { timeline, path, step, end: timeline.end || 1, from: 0, to: timeline.end || 1, by: "action" });
    this.chunks = Math.max(...timeline.marks.flat().map(mark => mark[2]), 0);
    this.canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": "timeline of the step; plus and minus zoom, arrows pan" });
    this.info = make("output", {}, "Point at a box, or tap it.");
    this.fingers = new Map();
    this.listen();
    new ResizeObserver(() => this.paint()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  element() {
    const button = (text, label, work) => make("button", { onclick: work, "aria-label": label, title: label }, text);
    const legend = this.legend = make("div", { class: "legend" });
    this.explain();
    return section("timeline", "Timeline",
      make("div", { class: "controls" },
        button("+", "zoom in", () => this.zoom(0.5)), button("−", "zoom out", () => this.zoom(2)),
        button("◀", "earlier", () => this.pan(-0.3)), button("▶", "later", () => this.pan(0.3)),
        button("all", "the whole step", () => this.view(0, this.end)),
        choice("colour", [["action", "by action"], ["microbatch", "by microbatch"]], by => { this.by = by; this.explain(); this.paint(); })),
      legend, this.canvas, this.info, leftOut(this.said()));
  }

  said() {
    const short = this.path.left_out ? [`${this.path.left_out} of the shortest pieces of the critical path`] : [];
    return [...this.timeline.left_out, ...short];
  }

  explain() {
    const entry = (colour, text) => {
      const swatch = make("i");
      swatch.style.background = colour;
      return make("span", {}, swatch, text);
    };
    const used = new Set(this.timeline.marks.flat().map(mark => mark[0]));
    const kinds = this.timeline.kinds.flatMap(([name, colour], n) => (used.has(n) ? [entry(colour, name)] : []));
    const actions = this.by === "action" ? kinds : [make("span", {}, "a colour for each microbatch")];
    const lighter = this.by === "action" && this.chunks ? [make("span", {}, "lighter: later stages of a rank")] : [];
    const moves = this.timeline.rows.some(row => row.strips.length) ? [entry("var(--moves)", "communication (below the boxes)")] : [];
    this.legend.replaceChildren(...actions, ...lighter, ...moves, entry("var(--path)", "critical path, its stages numbered"));
  }

  // --- what is seen -----------------------------------------------------------------------------------

  view(from, to) {
    const least = this.end / 2 ** 16;
    const width = Math.min(Math.max(to - from, least), this.end);
    this.from = Math.min(Math.max(from, 0), this.end - width);
    this.to = this.from + width;
    this.paint();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.view(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  pan(part) { const by = part * (this.to - this.from); this.view(this.from + by, this.to + by); }

  get gutter() { return this.canvas.clientWidth < 600 ? 84 : 130; }

  x(time) { return this.gutter + (time - this.from) / (this.to - this.from) * (this.canvas.clientWidth - this.gutter); }

  time(x) { return this.from + (x - this.gutter) / (this.canvas.clientWidth - this.gutter) * (this.to - this.from); }

  // --- hands ------------------------------------------------------------------------------------------

  listen() {
    const { canvas, fingers } = this;
    const at = event => { const frame = canvas.getBoundingClientRect(); return [event.clientX - frame.left, event.clientY - frame.top]; };
    canvas.addEventListener("pointerdown", event => {
      fingers.set(event.pointerId, at(event));
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", event => {
      const before = fingers.get(event.pointerId);
      const now = at(event);
      if (!before) { this.tell(...now); return; }
      const others = [...fingers].filter(([id]) => id !== event.pointerId);
      if (others.length) {
        const [other] = others[0][1];
        const spread = Math.abs(before[0] - other) / Math.max(Math.abs(now[0] - other), 8);
        this.zoom(Math.min(Math.max(spread, 0.5), 2), this.time((now[0] + other) / 2));
      } else {
        const by = (before[0] - now[0]) / (canvas.clientWidth - this.gutter) * (this.to - this.from);
        this.view(this.from + by, this.to + by);
      }
      fingers.set(event.pointerId, now);
    });
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, event => fingers.delete(event.pointerId));
    }
    canvas.addEventListener("click", event => this.tell(...at(event)));
    canvas.addEventListener("dblclick", event => this.zoom(0.4, this.time(at(event)[0])));
    canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.3 : 1 / 1.3, this.time(at(event)[0]));
    }, { passive: false });
    const keys = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.view(0, this.end),
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2) };
    canvas.addEventListener("keydown", event => {
      if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      keys[event.key]();
    });
  }

  tell(x, y) {
    if (x < this.gutter) return;
    const time = this.time(x);
    const row = Math.floor((y - AXIS) / ROW);
    const when = (start, length) => `${seconds(length / 1e9)}, from ${seconds(start / 1e9)} to ${seconds((start + length) / 1e9)}`;
    if (row === 0) {
      const piece = this.find(this.path.segments, 4, time);
      this.info.textContent = piece < 0 ? "" : `critical path: ${this.path.names[this.path.segments[piece + 3]] || "an op"} on stage ` +
        `${this.path.segments[piece + 2]}: ${when(this.path.segments[piece], this.path.segments[piece + 1])}`;
      return;
    }
    const own = this.timeline.rows[row - 1];
    if (!own) return;
    const low = (y - AXIS) / ROW - row > 0.74;
    const box = low ? -1 : this.find(own.boxes, 3, time);
    const strip = this.find(own.strips, 2, time);
    const said = [];
    if (box >= 0) {
      const marks = this.timeline.marks[own.boxes[box + 2]].map(([kind, microbatch, chunk]) =>
        this.timeline.kinds[kind][0] + (microbatch < 0 ? "" : ` of microbatch ${microbatch}`) +
        (this.chunks ? `, stage ${chunk + 1} of its rank` : ""));
      said.push(`${marks.join(" beside ")}: ${when(own.boxes[box], own.boxes[box + 1])}`);
    }
    if (strip >= 0) said.push(`communication: ${when(own.strips[strip], own.strips[strip + 1])}`);
    this.info.textContent = `${own.label}: ${said.join("; ") || `idle at ${seconds(time / 1e9)}`}`;
  }

  // The place of the piece, of so many numbers each, that is on at a time; -1 if none is, give or take two dots.
  find(pieces, size, time) {
    const near = 2 * (this.to - this.from) / (this.canvas.clientWidth - this.gutter);
    const first = this.first(pieces, size, time - near);
    return first < pieces.length && pieces[first] <= time + near ? first : -1;
  }

  // The place of the first piece that ends at a time or after it.
  first(pieces, size, time) {
    let [low, high] = [0, pieces.length / size];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (pieces[middle * size] + pieces[middle * size + 1] < time) low = middle + 1;
      else high = middle;
    }
    return low * size;
  }

  // --- paint ------------------------------------------------------------------------------------------

  colour([kind, microbatch, chunk]) {
    if (this.by === "microbatch") return microbatch < 0 ? colourOf("--soft") : `hsl(${(microbatch * 137.5) % 360} 62% 67%)`;
    const white = this.chunks ? 0.6 * chunk / this.chunks : 0;
    const own = [1, 3, 5].map(at => parseInt(this.timeline.kinds[kind][1].slice(at, at + 2), 16));
    return `rgb(${own.map(part => Math.round(part * (1 - white) + 255 * white)).join(" ")})`;
  }

  paint() {
    const { canvas, timeline } = this;
    const width = canvas.clientWidth;
    const height = AXIS + ROW * (timeline.rows.length + 1);
    if (!width) return;
    const dots = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    if (canvas.width !== Math.round(width * dots) || canvas.height !== Math.round(height * dots)) {
      canvas.width = Math.round(width * dots);
      canvas.height = Math.round(height * dots);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(dots, 0, 0, dots, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, 0, width - this.gutter, height);
    pen.clip();
    this.paintAxis(pen, width, height);
    const line = (pieces, size, top, tall, colour) => {
      pen.fillStyle = colour;
      for (let i = this.first(pieces, size, this.from); i < pieces.length && pieces[i] <= this.to; i += size) {
        const left = this.x(pieces[i]);
        pen.fillRect(left, top, Math.max(this.x(pieces[i] + pieces[i + 1]) - left, 0.5), tall);
      }
    };
    const path = this.path.segments;
    line(path, 4, AXIS + 6, ROW - 14, colourOf("--path"));
    this.paintStages(pen, path);
    timeline.rows.forEach((row, n) => {
      const top = AXIS + ROW * (n + 1);
      this.paintBoxes(pen, row.boxes, top + 2);
      line(row.strips, 2, top + 22, 5, colourOf("--moves"));
    });
    pen.restore();
    pen.fillStyle = colourOf("--text");
    pen.textAlign = "left";
    ["critical path", ...timeline.rows.map(row => row.label)].forEach((label, n) =>
      pen.fillText(label, 0, AXIS + ROW * n + 13, this.gutter - 6));
  }

  paintAxis(pen, width, height) {
    const many = Math.max(2, (width - this.gutter) / 110);
    for (const each of ticks(this.from / 1e9, this.to / 1e9, many)) {
      const x = this.x(each * 1e9);
      pen.fillStyle = colourOf("--line");
      pen.fillRect(x, AXIS - 4, 1, height);
      pen.fillStyle = colourOf("--soft");
      pen.textAlign = x < this.gutter + 20 ? "left" : x > width - 20 ? "right" : "center";
      pen.fillText(this.label(each, (this.to - this.from) / 1e9), x, 9);
    }
  }

  // A time in the unit of what is seen, with the digits that tell ticks apart.
  label(time, seen) {
    const [size, unit] = seen > 0.5 ? [1, "s"] : seen > 5e-4 ? [1e-3, "ms"] : [1e-6, "us"];
    return `${Number((time / size).toFixed(Math.max(0, 2 - Math.floor(Math.log10(seen / size)))))} ${unit}`;
  }

  paintStages(pen, path) {
    pen.fillStyle = colourOf("--back");
    pen.textAlign = "center";
    for (let i = this.first(path, 4, this.from); i < path.length && path[i] <= this.to; i += 4) {
      const [left, right] = [Math.max(this.x(path[i]), this.gutter), this.x(path[i] + path[i + 1])];
      if (i && right - left > 2) pen.fillRect(left, AXIS + 6, 1, ROW - 14);
      if (right - left > 20) pen.fillText(String(path[i + 2]), (left + right) / 2, AXIS + 14);
    }
  }

  paintBoxes(pen, boxes, top) {
    pen.textAlign = "center";
    for (let i = this.first(boxes, 3, this.from); i < boxes.length && boxes[i] <= this.to; i += 3) {
      const left = this.x(boxes[i]);
      const wide = Math.max(this.x(boxes[i] + boxes[i + 1]) - left, 0.5);
      const marks = this.timeline.marks[boxes[i + 2]];
      const tall = 19 / marks.length;
      marks.forEach((mark, n) => {
        pen.fillStyle = this.colour(mark);
        pen.fillRect(left, top + n * tall, wide > 3 ? wide - 0.7 : wide, tall);
        if (mark[1] < 0 || wide < 8 + 7 * String(mark[1]).length || tall < 12) return;
        pen.fillStyle = this.ink(mark);
        const middle = (Math.max(left, this.gutter) + Math.min(left + wide, this.canvas.clientWidth)) / 2;
        pen.fillText(String(mark[1]), middle, top + n * tall + tall / 2 + 0.5);
      });
    }
  }

  ink(mark) {
    if (this.by === "microbatch") return "#000000";
    const [red, green, blue] = this.colour(mark).match(/\d+/g).map(Number);
    return 0.299 * red + 0.587 * green + 0.114 * blue < 128 ? "#ffffff" : "#000000";
  }
}
