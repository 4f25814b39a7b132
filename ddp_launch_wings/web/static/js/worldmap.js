// The world map: nodes as boxes, and in them their ranks as cells, on one canvas, however many there are.
//
// Keyboard: the arrow keys move to the next rank, Home and End to the first and last, Enter opens it. What is selected is
// announced. The table of ranks has the same values.

import { announce, fill, h } from "./dom.js";
import { SCALES } from "./scales.js";
import { BAD } from "./state.js";
import { color, whenThemeChanges } from "./theme.js";

const GAP = 8, PAD = 5, LABEL = 18, MOST_HEIGHT = 460, SIZES = [56, 48, 40, 34, 28, 24, 20, 17, 15, 13, 11, 9, 7, 5];

export class WorldMap {
  constructor(state, select, signal) {
    this.state = state;
    this.select = select;
    this.scale = "health";
    this.selected = null;
    this.cells = [];
    this.canvas = h("canvas", { tabindex: "0", role: "img", class: "map" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.legend = h("div", { class: "legend small" });
    const modes = h("select", { "aria-label": "Color of the ranks", onchange: () => this.use(modes.value) },
      ...Object.entries(SCALES).map(([name, { title }]) => h("option", { value: name }, title)));
    this.element = h(
      "section", { class: "card", "aria-label": "World" },
      h("header", {}, h("h2", {}, "World"), this.legend, modes),
      h("div", { class: "canvas-box" }, this.canvas, this.tip),
    );
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("click", (event) => this.choose(this.at(event)?.rank));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.arrange()).observe(this.canvas.parentElement);
    whenThemeChanges(() => this.draw(), signal);
    state.on("job", () => this.arrange());
    state.on("ranks", () => this.draw());
  }

  use(scale) {
    this.scale = scale;
    this.draw();
  }

  // Places of all cells. Only a change of the nodes or of the width needs it.
  arrange() {
    const nodes = (this.state.job?.where || []).filter((node) => node.first !== null);
    const width = this.canvas.parentElement.clientWidth;
    const shape = JSON.stringify([width, nodes.map((node) => [node.node, node.first, node.nproc, node.health.length, node.excluded])]);
    if (!width || shape === this.shape) return this.draw();
    this.shape = shape;
    const fits = (size) => placed(nodes, size, width).height <= MOST_HEIGHT;
    const size = SIZES.find(fits) || SIZES.at(-1);
    const { boxes, height } = placed(nodes, size, width);
    Object.assign(this, { boxes, size, width, height: Math.max(height, 60) });
    this.cells = boxes.flatMap((box) => box.cells);
    this.byRank = new Map(this.cells.map((cell) => [cell.rank, cell]));
    const ratio = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * ratio, height: this.height * ratio });
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.draw();
  }

  draw() {
    const { state } = this, scale = SCALES[this.scale];
    if (!this.boxes) return;
    const pen = this.canvas.getContext("2d"), ratio = devicePixelRatio || 1;
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.drawImage(this.boxesDrawn(ratio), 0, 0);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.textBaseline = "middle";
    for (const cell of this.cells) this.drawCell(pen, cell, scale);
    const legend = scale.legend(state);
    this.drawLegend(legend);
    const counts = state.summary?.counts || [0, 0, 0, 0];
    const label = `${this.cells.length} ranks on ${this.boxes.length} nodes: ${counts[0]} well, ${counts[1]} slow, ${counts[2]} bad, ` +
      `${counts[3]} not known. Arrow keys select a rank.`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
  }

  // Boxes and names of nodes, drawn once for each arrangement and theme: the ranks change, the nodes do not.
  boxesDrawn(ratio) {
    const key = `${document.documentElement.dataset.theme} ${this.shape}`;
    if (this.layerKey === key) return this.layer;
    this.layerKey = key;
    this.layer = h("canvas", { width: this.canvas.width, height: this.canvas.height });
    const pen = this.layer.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.textBaseline = "middle";
    this.boxes.forEach((box) => this.drawBox(pen, box));
    return this.layer;
  }

  drawBox(pen, box) {
    pen.fillStyle = color("raised");
    pen.strokeStyle = box.trouble ? color("warn") : color("line");
    pen.lineWidth = box.trouble ? 1.5 : 1;
    pen.beginPath();
    pen.roundRect(box.x + 0.5, box.y + 0.5, box.w - 1, box.h - 1, 6);
    pen.fill();
    pen.stroke();
    if (!box.label) return;
    pen.fillStyle = color(box.trouble ? "warn" : "muted");
    pen.font = "11px system-ui, sans-serif";
    pen.fillText(shortened(pen, box.label, box.w - 2 * PAD), box.x + PAD, box.y + 10);
  }

  drawCell(pen, cell, scale) {
    const row = this.state.byRank.get(cell.rank), { size } = this, inset = size > 9 ? 1 : 0.5;
    pen.fillStyle = row ? scale.paint(row, this.state) : color("line");
    const side = size - 2 * inset;
    if (size < 20) pen.fillRect(cell.x + inset, cell.y + inset, side, side); // rounded ones take ten times as long
    else {
      pen.beginPath();
      pen.roundRect(cell.x + inset, cell.y + inset, side, side, Math.min(6, size / 5));
      pen.fill();
    }
    const level = row && this.state.summary.levels.get(cell.rank).level;
    if (level === BAD && this.scale === "health") this.cross(pen, cell); // not by color alone
    if (size >= 26 && !(level === BAD && this.scale === "health")) {
      pen.fillStyle = this.inkFor(level);
      pen.font = `${size >= 40 ? 14 : 11}px system-ui, sans-serif`;
      pen.textAlign = "center";
      pen.fillText(String(cell.rank), cell.x + size / 2, cell.y + size / 2 + 0.5);
      pen.textAlign = "left";
    }
    if (cell.rank === this.selected) {
      pen.strokeStyle = color("text");
      pen.lineWidth = 2;
      pen.strokeRect(cell.x, cell.y, size, size);
    }
  }

  inkFor(level) {
    if (this.scale === "health") return color(level === 0 ? "on-well" : "surface");
    return color(this.scale === "phase" ? "surface" : "text");
  }

  cross(pen, { x, y }) {
    const a = this.size * 0.32, b = this.size - a;
    pen.strokeStyle = color("surface");
    pen.lineWidth = Math.max(1.5, this.size / 9);
    pen.beginPath();
    pen.moveTo(x + a, y + a);
    pen.lineTo(x + b, y + b);
    pen.moveTo(x + b, y + a);
    pen.lineTo(x + a, y + b);
    pen.stroke();
  }

  drawLegend(legend) {
    const text = JSON.stringify(legend);
    if (text === this.legendText) return;
    this.legendText = text;
    const patch = (shade) => {
      const mark = h("span", { class: "patch" });
      mark.style.background = shade;
      return mark;
    };
    const words = (text) => h("span", {}, text);
    if (legend.items) return fill(this.legend, legend.items.map(([shade, name]) => h("span", { class: "item" }, patch(shade), name)));
    const bar = h("span", { class: "ramp" });
    bar.style.background = `linear-gradient(to right, ${legend.gradient.join(",")})`;
    fill(this.legend, words(legend.low), bar, words(legend.high));
  }

  at(event) {
    const { left, top } = this.canvas.getBoundingClientRect(), { size } = this;
    const x = event.clientX - left, y = event.clientY - top;
    return this.cells.find((cell) => x >= cell.x && x < cell.x + size && y >= cell.y && y < cell.y + size);
  }

  words(rank) {
    const row = this.state.byRank.get(rank), node = this.state.nodeOf(rank);
    const where = `rank ${rank}${node ? ` on ${node.node}` : ""}`;
    if (!row) return `${where}: does not answer`;
    const { column, summary } = this.state;
    const health = summary.levels.get(rank);
    const value = this.scale === "health" ? "" : `, ${SCALES[this.scale].words(row, this.state)}`;
    return `${where}: ${row[column.phase]}, step ${row[column.step]}, ${health.words}${value}`;
  }

  hover(event) {
    const cell = this.at(event);
    this.tip.hidden = !cell;
    this.canvas.style.cursor = cell ? "pointer" : "";
    if (!cell) return;
    this.tip.textContent = this.words(cell.rank);
    const left = Math.min(cell.x, Math.max(0, this.width - this.tip.offsetWidth - 4));
    this.tip.style.transform = `translate(${left}px, ${cell.y + this.size + 6}px)`;
  }

  choose(rank, tell = false) {
    if (rank === undefined) return;
    this.mark(rank);
    if (tell) announce(this.words(rank));
    this.select(rank);
  }

  mark(rank) {
    this.selected = rank;
    this.draw();
  }

  key(event) {
    const ranks = this.cells.map((cell) => cell.rank);
    if (!ranks.length) return;
    const at = Math.max(0, ranks.indexOf(this.selected)), last = ranks.length - 1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: this.below(at, 1), ArrowUp: this.below(at, -1), Home: 0, End: last, Enter: at }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.choose(ranks[Math.max(0, Math.min(last, this.selected === null ? 0 : to))], true);
  }

  // The cell in the next row that is nearest.
  below(at, way) {
    const from = this.cells[at];
    let best = at, least = Infinity;
    this.cells.forEach((cell, n) => {
      const down = (cell.y - from.y) * way;
      if (down < this.size / 2) return;
      const far = down * 3 + Math.abs(cell.x - from.x);
      if (far < least) [best, least] = [n, far];
    });
    return best;
  }
}

function placed(nodes, size, width) {
  const labels = size >= 11 || nodes.length <= 16;
  let x = 0, y = 0, tallest = 0;
  const boxes = nodes.map((node) => {
    const columns = Math.min(node.nproc, node.nproc > 16 ? 8 : node.nproc > 4 ? 4 : node.nproc);
    const rows = Math.ceil(node.nproc / columns), top = labels ? LABEL : PAD;
    const w = Math.max(columns * size + 2 * PAD, nodes.length <= 16 ? 120 : 0), hgt = rows * size + top + PAD;
    if (x && x + w > width) [x, y, tallest] = [0, y + tallest + GAP, 0];
    const cells = Array.from({ length: node.nproc }, (_, n) => ({
      rank: node.first + n, x: x + PAD + (n % columns) * size, y: y + top + Math.floor(n / columns) * size,
    }));
    const box = { x, y, w, h: hgt, cells, label: labels ? node.node : "", trouble: node.health.length > 0 || !!node.excluded || !node.present };
    x += w + GAP;
    tallest = Math.max(tallest, hgt);
    return box;
  });
  return { boxes, height: y + tallest };
}

function shortened(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let first = 1; // names of nodes differ at their ends
  while (first < text.length && pen.measureText(`…${text.slice(first)}`).width > width) first += 1;
  return `…${text.slice(first)}`;
}
