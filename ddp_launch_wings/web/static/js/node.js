// How much of a node is used: that of the rank in the panel. Dashed lines are restarts.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { fill, h, say } from "./dom.js";
import { bytes, percent } from "./format.js";

const EVERY_MS = 5000, MOST_MOMENTS = 500;
const share = { text: (value) => percent(value / 100), most: 100 }, rate = { text: (value) => `${bytes(value)}/s` };
const CHARTS = [
  ["CPU", [["CPU", "c1", "cpu_percent"]], { ...share, note: "Of all CPUs, or of the quota of the container" }],
  ["Memory", [["Memory", "c2", "memory_percent"], ["GPU memory, fullest", "c4", "gpu_memory_percent"]], share],
  ["GPU use", [["Mean", "c1", "gpu_percent"], ["Least", "c3", "gpu_least_percent"]], share],
  ["GPU temperature", [["Temperature", "c3", "gpu_celsius"]], { text: (value) => `${Math.round(value)} °C`, note: "Of the hottest GPU" }],
  ["Network", [["Received", "c1", "received_bytes"], ["Sent", "c4", "sent_bytes"]], rate],
  ["Disk", [["Read", "c1", "read_bytes"], ["Written", "c4", "written_bytes"]], rate],
];

export class NodeCharts {
  constructor(state, name, panel, signal) {
    Object.assign(this, { state, name, panel, signal, node: null, moments: new Map(), last: 0 });
    this.charts = CHARTS.map(([title, lines, more]) => ({
      keys: lines.map(([, , key]) => key),
      chart: new Chart(title, lines.map(([line, shade, key]) => [line, shade, (each) => each[key] ?? null]), more, signal),
    }));
    this.title = h("h2", {});
    this.box = h("div", { class: "charts" });
    this.element = h("section", { "aria-label": "Node", hidden: true }, this.title, this.box);
    const timer = setInterval(() => this.read(), EVERY_MS);
    signal.addEventListener("abort", () => clearInterval(timer));
    state.on("job", () => this.turn());
    panel.turned = () => this.turn();
  }

  // Reads at once if the rank of the panel is on another node.
  turn() {
    if (this.state.nodeOf(this.panel.rank ?? 0)?.node !== this.node) this.read();
  }

  async read() {
    const rank = this.panel.rank ?? 0, node = this.state.nodeOf(rank)?.node;
    if (!node || document.hidden || (this.state.job.is_over && node === this.node)) return;
    if (node !== this.node) Object.assign(this, { node, moments: new Map(), last: 0 });
    try {
      const found = await get("node", { job: this.name, rank, after: this.last });
      if (node !== this.node || this.signal.aborted) return;
      if (found.last < this.last) Object.assign(this, { moments: new Map(), last: 0 }); // of another agent
      else this.take(found);
    } catch {
      return; // the node does not answer now
    }
    this.show();
  }

  take({ points, last }) {
    this.last = last;
    for (const [at, key, value, generation] of points) {
      if (!this.moments.has(at)) this.moments.set(at, { at, generation });
      this.moments.get(at)[key] = value;
    }
    if (this.moments.size > MOST_MOMENTS) this.moments = new Map([...this.moments].filter((_, n) => n % 2));
  }

  show() {
    const data = [...this.moments.values()].sort((a, b) => a.at - b.at);
    const known = this.charts.filter(({ keys }) => data.some((each) => each[keys[0]] !== undefined));
    this.element.hidden = !known.length;
    say(this.title, `Node ${this.node}`);
    if (known.length !== this.box.children.length) fill(this.box, known.map(({ chart }) => chart.element));
    const marks = data.filter((each, n) => n && each.generation !== data[n - 1].generation).map((each) => each.at);
    for (const { chart } of known) chart.show(data, marks);
  }
}
