// A chart over time on a canvas: lines, or shares that are stacked. The value under the pointer is shown as text.

import { fill, h } from "./dom.js";
import { moment, time } from "./format.js";
import { color, whenThemeChanges } from "./theme.js";

const HEIGHT = 150, LEFT = 68, BOTTOM = 20, TOP = 8, RIGHT = 6;

export class Chart {
  // `lines`: [title, color name, value of an interval]. `text`: a value as text. `most`: the end of the scale, else fitting.
  // `place`: where a value is, as text. `fits`: the scale begins at the least value, not at 0.
  constructor(title, lines, { text, most = null, stacked = false, note = "", place = null, fits = false }, signal) {
    Object.assign(this, { title, lines, text, most, stacked, place, fits, data: [], marks: [] });
    this.canvas = h("canvas", { role: "img", "aria-label": title });
    this.now = h("span", { class: "now" });
    this.tip = h("div", { class: "tip", hidden: true });
    const names = h("div", { class: "legend small" }, lines.length > 1 ? lines.map(([name, shade]) => h("span", { class: "item" }, h("span", { class: `patch ${shade}` }), name)) : note);
    this.element = h("figure", { class: "card chart" }, h("figcaption", {}, h("h2", {}, title), this.now), h("div", { class: "canvas-box" }, this.canvas, this.tip), names);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    whenThemeChanges(() => this.draw(), signal);
  }

  // `marks`: moments of restarts.
  show(data, marks) {
    this.data = data;
    this.marks = marks;
    this.draw();
    const last = data.findLast((each) => this.value(each, 0) !== null);
    const known = last ? this.lines.filter(([, , value]) => value(last) !== null) : [];
    const words = last ? known.map(([name, , value]) => `${this.lines.length > 1 ? `${name} ` : ""}${this.text(value(last))}`) : ["no data yet"];
    this.canvas.setAttribute("aria-label", `${this.title}: ${words.join(", ")}`);
    this.now.textContent = last && !this.stacked ? words[0].replace(/^[^0-9–]* (?=\d)/, "") : "";
  }

  value(each, n) {
    return this.lines[n][2](each);
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return;
    if (this.canvas.width !== width * ratio) {
      Object.assign(this.canvas, { width: width * ratio, height: HEIGHT * ratio });
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${HEIGHT}px`;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, HEIGHT);
    pen.font = "11px system-ui, sans-serif";
    this.scale(width);
    this.drawAxes(pen, width);
    if (this.data.length > 1) this.stacked ? this.drawStack(pen) : this.lines.forEach((_, n) => this.drawLine(pen, n));
    this.drawMarks(pen);
    if (this.pointed) this.drawPointer(pen);
  }

  scale(width) {
    const places = this.data.map((each) => each.at), first = this.first = least(places) ?? 0;
    const last = this.last = places.length ? -least(places.map((at) => -at)) : 1, span = Math.max(1, last - first);
    this.x = (at) => LEFT + ((at - first) / span) * (width - LEFT - RIGHT);
    const values = this.stacked ? [1] : this.data.flatMap((each) => this.lines.map((_, n) => this.value(each, n) ?? 0));
    this.top = this.most ?? (nice(Math.max(...values, 0) * 1.08) || 1);
    this.low = 0;
    if (this.fits && this.data.length) {
      const known = this.data.map((each) => this.value(each, 0)).filter((value) => value !== null);
      this.low = least(known) ?? 0;
      this.top = Math.max(this.low + 1e-9, -(least(known.map((value) => -value)) ?? -1));
    }
    this.y = (value) => HEIGHT - BOTTOM - ((Math.min(value, this.top) - this.low) / (this.top - this.low)) * (HEIGHT - BOTTOM - TOP);
  }

  drawAxes(pen, width) {
    pen.textBaseline = "middle";
    pen.lineWidth = 1;
    for (const share of [0, 0.5, 1]) {
      const value = this.low + share * (this.top - this.low), y = Math.round(this.y(value)) + 0.5;
      pen.strokeStyle = color("line");
      pen.beginPath();
      pen.moveTo(LEFT, y);
      pen.lineTo(width - RIGHT, y);
      pen.stroke();
      pen.fillStyle = color("muted");
      pen.textAlign = "right";
      pen.fillText(value ? this.text(value) : "0", LEFT - 6, y);
    }
    if (this.data.length < 2) return this.drawEmpty(pen, width);
    pen.textBaseline = "alphabetic";
    for (const [at, align] of [[this.first, "left"], [this.last, "right"]]) {
      pen.textAlign = align;
      pen.fillText((this.place ?? time)(at), this.x(at), HEIGHT - 5);
    }
  }

  drawEmpty(pen, width) {
    pen.textAlign = "center";
    pen.fillText("The first values come after some seconds of training.", (LEFT + width) / 2, HEIGHT / 2);
  }

  drawLine(pen, n) {
    pen.strokeStyle = color(this.lines[n][1]);
    pen.lineWidth = 1.8;
    pen.lineJoin = "round";
    pen.beginPath();
    let drawn = false;
    for (const each of this.data) {
      const value = this.value(each, n);
      if (value === null) drawn = false;
      else if (drawn) pen.lineTo(this.x(each.at), this.y(value));
      else {
        pen.moveTo(this.x(each.at), this.y(value));
        drawn = true;
      }
    }
    pen.stroke();
  }

  drawStack(pen) {
    const below = new Float64Array(this.data.length);
    this.lines.forEach(([, shade], n) => {
      pen.fillStyle = color(shade);
      pen.beginPath();
      this.data.forEach((each, m) => pen.lineTo(this.x(each.at), this.y(below[m])));
      for (let m = this.data.length - 1; m >= 0; m--) {
        below[m] += this.value(this.data[m], n);
        pen.lineTo(this.x(this.data[m].at), this.y(below[m]));
      }
      pen.fill();
    });
  }

  drawMarks(pen) {
    if (this.data.length < 2) return;
    pen.strokeStyle = color("bad");
    pen.setLineDash([3, 3]);
    pen.lineWidth = 1;
    for (const mark of this.marks) {
      const x = Math.round(this.x(mark)) + 0.5;
      if (mark < this.first || mark > this.last) continue;
      pen.beginPath();
      pen.moveTo(x, TOP);
      pen.lineTo(x, HEIGHT - BOTTOM);
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  drawPointer(pen) {
    const x = Math.round(this.x(this.pointed.at)) + 0.5;
    pen.strokeStyle = color("muted");
    pen.beginPath();
    pen.moveTo(x, TOP);
    pen.lineTo(x, HEIGHT - BOTTOM);
    pen.stroke();
  }

  hover(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    if (this.data.length < 2) return;
    this.pointed = this.data.reduce((best, each) => (Math.abs(this.x(each.at) - x) < Math.abs(this.x(best.at) - x) ? each : best));
    const values = this.lines.map(([name, , value]) => [name, value(this.pointed)]).filter(([, value]) => value !== null && (!this.stacked || value > 0.0005));
    fill(this.tip, h("div", { class: "muted" }, (this.place ?? moment)(this.pointed.at)), values.map(([name, value]) => h("div", {}, `${this.lines.length > 1 ? `${name} ` : ""}${this.text(value)}`)));
    this.tip.hidden = false;
    const left = this.x(this.pointed.at), wide = this.canvas.clientWidth;
    this.tip.style.transform = `translate(${left > wide / 2 ? left - this.tip.offsetWidth - 10 : left + 10}px, 8px)`;
    this.draw();
  }

  leave() {
    this.pointed = null;
    this.tip.hidden = true;
    this.draw();
  }
}

const least = (values) => (values.length ? values.reduce((best, each) => Math.min(best, each)) : null);

function nice(value) {
  if (!(value > 0)) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value) * power;
}
