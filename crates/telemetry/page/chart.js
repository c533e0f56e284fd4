"use strict";
// Line charts in SVG: a thin raw line with its running mean above it, dots for rare measurements, a readout by pointer or keys.

// A series of (step, value) that stays small: when it is full, every second point goes.
class Series {
  constructor(limit = 6000) { this.limit = limit; this.x = []; this.y = []; this.stride = 1; this.seen = 0; this.provisional = false; }
  push(x, y) {
    const last = this.x.length - 1;
    if (last >= 0 && x <= this.x[last]) { if (x === this.x[last]) this.y[last] = y; return; }
    if (this.provisional) { this.x.pop(); this.y.pop(); }
    this.x.push(x); this.y.push(y);
    // A point between the kept ones stays until the next comes, so that the curve always ends with the latest.
    this.provisional = this.seen++ % this.stride !== 0;
    if (this.x.length > this.limit) {
      const keep = (_, i) => i % 2 === 0;
      this.x = this.x.filter(keep); this.y = this.y.filter(keep); this.stride *= 2;
    }
  }
  cutAfter(x) { while (this.x.length && this.x[this.x.length - 1] > x) { this.x.pop(); this.y.pop(); this.provisional = false; } }
  nearest(x) {
    let lo = 0, hi = this.x.length - 1;
    if (hi < 0) return -1;
    while (hi - lo > 1) { const mid = (lo + hi) >> 1; if (this.x[mid] < x) lo = mid; else hi = mid; }
    return Math.abs(this.x[lo] - x) <= Math.abs(this.x[hi] - x) ? lo : hi;
  }
  last() { return this.y.length ? this.y[this.y.length - 1] : undefined; }
  // Mean of a forgetting average from the left and one from the right, so that the curve does not lag behind what it follows.
  mean() {
    const keep = Math.pow(0.5, 1 / Math.max(1, this.y.length / 150)), out = new Array(this.y.length).fill(NaN);
    const pass = (from, by) => {
      let mean, weight = 0;
      for (let i = from; i >= 0 && i < this.y.length; i += by) {
        const y = this.y[i];
        if (Number.isFinite(y)) { weight = weight * keep + 1; mean = mean === undefined ? y : mean + (y - mean) / weight; }
        if (mean !== undefined) out[i] = by > 0 ? mean : Number.isFinite(out[i]) ? (out[i] + mean) / 2 : mean;
      }
    };
    pass(0, 1); pass(this.y.length - 1, -1);
    return out;
  }
}

const SVG = "http://www.w3.org/2000/svg";
function svg(name, attributes, parent, text) {
  const node = document.createElementNS(SVG, name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function niceTicks(low, high, count) {
  const span = high - low || Math.abs(high) || 1, raw = span / count, power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(s => s >= raw * 0.999) || power * 10;
  const ticks = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-6; t += step) ticks.push(Math.abs(t) < step * 1e-6 ? 0 : t);
  return ticks;
}

class Chart {
  // series: [{ name, color, data: Series, dots, smooth, format }]
  constructor(root, title, series, options = {}) {
    Object.assign(this, { root, title, series, options, log: false, cursor: null, bad: [] });
    this.legend = root.appendChild(Object.assign(document.createElement("div"), { className: "legend" }));
    this.svg = svg("svg", { role: "img", tabindex: "0" });
    root.appendChild(this.svg);
    this.tip = root.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true }));
    this.tip.setAttribute("role", "status");
    this.svg.addEventListener("pointermove", e => this.point(this.stepAt(e.clientX - this.svg.getBoundingClientRect().left)));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", e => this.key(e));
    new ResizeObserver(() => this.draw()).observe(root);
  }
  key(e) {
    const main = this.series.map(s => s.data).reduce((a, b) => (b.x.length > a.x.length ? b : a));
    if (e.key === "Escape") this.point(null);
    else if (e.key === "l" || e.key === "L") { this.log = !this.log; this.draw(); }
    else if (main.x.length && ["ArrowLeft", "ArrowRight", "Home", "End"].includes(e.key)) {
      const at = this.cursor === null ? main.x.length - 1 : main.nearest(this.cursor), jump = e.shiftKey ? 20 : 1;
      const to = { ArrowLeft: at - (this.cursor === null ? 0 : jump), ArrowRight: at + jump, Home: 0, End: main.x.length - 1 }[e.key];
      this.point(main.x[Math.max(0, Math.min(main.x.length - 1, to))]);
      e.preventDefault();
    }
  }
  stepAt(px) { const b = this.box; return b ? b.x0 + (px - b.left) / (b.right - b.left) * (b.x1 - b.x0) : null; }
  point(step) { this.cursor = step; this.drawCursor(); }

  draw() {
    const width = this.root.clientWidth, height = 214;
    if (!width) return;
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.drawLegend();
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const s of this.series) {
      const mean = s.means = s.smooth ? s.data.mean() : s.data.y, warm = Math.min(5, s.data.y.length >> 3);
      s.data.x.forEach((x, i) => {
        x0 = Math.min(x0, x); x1 = Math.max(x1, x);
        // The first few raw values and lone spikes do not set the scale; the mean always does.
        const y = s.smooth && i >= warm ? (s.data.y[i] * 0.5 + mean[i] * 0.5) : mean[i];
        if (Number.isFinite(y) && (!this.log || y > 0)) { y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
      });
    }
    if (!Number.isFinite(y0)) {
      this.box = null;
      svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, this.svg, this.options.empty || "nothing measured yet");
      this.svg.setAttribute("aria-label", `${this.title}: nothing measured yet`);
      return;
    }
    if (x1 === x0) x1 = x0 + 1;
    if (this.options.floor !== undefined && !this.log) y0 = Math.min(this.options.floor, y0);
    const pad = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
    if (!this.log) { y1 += pad; if (this.options.floor === undefined) y0 -= pad; }
    const b = this.box = { left: 46, right: width - 10, top: 8, bottom: height - 24, x0, x1, y0, y1 };
    const f = this.log ? Math.log : v => v;
    b.px = x => b.left + (x - x0) / (x1 - x0) * (b.right - b.left);
    b.py = y => b.bottom - (f(y) - f(y0)) / ((f(y1) - f(y0)) || 1) * (b.bottom - b.top);
    const ticks = this.log ? [...new Set([y0, Math.sqrt(y0 * y1), y1])] : niceTicks(y0, y1, 5);
    for (const t of ticks) {
      svg("line", { class: "gridline", x1: b.left, x2: b.right, y1: b.py(t), y2: b.py(t) }, this.svg);
      svg("text", { x: b.left - 8, y: b.py(t) + 4, "text-anchor": "end" }, this.svg, this.options.axis ? this.options.axis(t) : short(t));
    }
    for (const t of niceTicks(x0, x1, Math.max(2, Math.floor(width / 110))).filter(t => Number.isInteger(t))) {
      svg("text", { x: b.px(t), y: height - 7, "text-anchor": b.px(t) > b.right - 14 ? "end" : "middle" }, this.svg, short(t));
    }
    svg("line", { class: "base", x1: b.left, x2: b.right, y1: b.bottom, y2: b.bottom }, this.svg);
    const clip = svg("clipPath", { id: `clip-${this.root.id}` }, this.svg);
    svg("rect", { x: b.left - 6, y: b.top - 6, width: b.right - b.left + 12, height: b.bottom - b.top + 7 }, clip);
    const plot = svg("g", { "clip-path": `url(#clip-${this.root.id})` }, this.svg);
    for (const x of this.bad.filter(x => x >= x0 && x <= x1)) svg("line", { class: "bad", x1: b.px(x), x2: b.px(x), y1: b.bottom - 9, y2: b.bottom }, plot);
    for (const s of this.series) this.drawSeries(plot, s);
    this.marks = svg("g", {}, this.svg);
    const lasts = this.series.filter(s => s.data.y.length).map(s => `${s.name} ${s.format(s.data.last())}`);
    this.svg.setAttribute("aria-label", `${this.title} by step: ${lasts.join(", ")}. Arrow keys read values.`);
    this.drawCursor();
  }
  drawSeries(plot, s) {
    const { px, py } = this.box, style = `stroke:var(${s.color})`;
    const path = ys => {
      let d = "", pen = false;
      s.data.x.forEach((x, i) => {
        const ok = Number.isFinite(ys[i]) && (!this.log || ys[i] > 0);
        if (ok) d += `${pen ? "L" : "M"}${px(x).toFixed(1)} ${py(ys[i]).toFixed(1)}`;
        pen = ok;
      });
      return d;
    };
    if (s.smooth) svg("path", { class: "raw", d: path(s.data.y), style }, plot);
    svg("path", { class: "line", d: path(s.means), style: s.dots ? style + ";stroke-width:1.5;opacity:.55" : style }, plot);
    if (s.dots) s.data.x.forEach((x, i) => {
      if (Number.isFinite(s.data.y[i])) svg("circle", { class: "dot", cx: px(x), cy: py(s.data.y[i]), r: s.data.x.length > 60 ? 3.5 : 4.5, style: `fill:var(${s.color})` }, plot);
    });
  }
  drawLegend() {
    this.legend.replaceChildren(...this.series.filter(s => s.data.y.length).map(s => {
      const item = document.createElement("span"), mark = document.createElement("i"), value = document.createElement("b");
      mark.style.background = `var(${s.color})`;
      if (s.dots) mark.className = "round";
      value.textContent = s.format(s.data.last());
      item.append(mark, s.name, value);
      return item;
    }));
  }
  drawCursor() {
    if (!this.marks) return;
    this.marks.replaceChildren();
    this.tip.hidden = this.cursor === null || !this.box;
    if (this.tip.hidden) return;
    const b = this.box, main = this.series.map(s => s.data).reduce((a, c) => (c.x.length > a.x.length ? c : a));
    const step = main.x[main.nearest(Math.max(b.x0, Math.min(b.x1, this.cursor)))];
    svg("line", { class: "cross", x1: b.px(step), x2: b.px(step), y1: b.top, y2: b.bottom }, this.marks);
    const head = Object.assign(document.createElement("div"), { className: "at", textContent: `step ${step.toLocaleString("en")}` });
    const rows = this.series.filter(s => s.data.x.length).map(s => {
      const i = s.data.nearest(step), row = document.createElement("div"), name = document.createElement("span"), mark = document.createElement("i"), value = document.createElement("b");
      mark.style.background = `var(${s.color})`;
      name.append(mark, s.data.x[i] === step ? s.name : `${s.name}, step ${s.data.x[i].toLocaleString("en")}`);
      value.textContent = s.format(s.data.y[i]);
      row.append(name, value);
      if (Number.isFinite(s.data.y[i])) svg("circle", { class: "dot", cx: b.px(s.data.x[i]), cy: Math.max(b.top, Math.min(b.bottom, b.py(s.data.y[i]))), r: 4.5, style: `fill:var(${s.color})` }, this.marks);
      return row;
    });
    this.tip.replaceChildren(head, ...rows);
    const left = b.px(step) + 14, wide = this.tip.offsetWidth;
    this.tip.style.left = `${left + wide > b.right ? Math.max(0, b.px(step) - wide - 14) : left}px`;
  }
}

function short(v) {
  const a = Math.abs(v);
  if (a >= 1e9) return trim(v / 1e9) + "G";
  if (a >= 1e6) return trim(v / 1e6) + "M";
  if (a >= 1e4) return trim(v / 1e3) + "k";
  return a >= 100 || Number.isInteger(v) ? String(Math.round(v)) : trim(v);
}
function trim(v) { return String(+v.toPrecision(3)); }
