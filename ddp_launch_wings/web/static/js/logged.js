// What the script measures (`ddp.log`): a chart over steps for each name. Dashed lines are restarts.

import { Chart } from "./chart.js";
import { fill, h } from "./dom.js";
import { precise } from "./format.js";

const MOST_CHARTS = 12, MOST_POINTS = 1000;

export class Logged {
  constructor(state, signal) {
    Object.assign(this, { signal, charts: new Map() });
    this.element = h("section", { class: "charts", "aria-label": "What the script measures" });
    state.on("logged", () => this.show(state.logged));
  }

  show(logged) {
    for (const [name, line] of logged) {
      if (!this.charts.has(name)) {
        if (this.charts.size >= MOST_CHARTS) continue;
        const chart = new Chart(name, [[name, "c1", (each) => each.value]], { text: short, place: (step) => `step ${step.toLocaleString("en")}`, fits: true, note: "As the script measures it" }, this.signal);
        this.charts.set(name, chart);
        fill(this.element, [...this.charts.values()].map((each) => each.element));
      }
      this.charts.get(name).show(line.data, line.marks);
    }
  }
}

// Adds points of the service, [name, step, value, generation], to the lines by name.
export function addLogged(lines, points) {
  for (const [name, step, text, generation] of points) {
    let line = lines.get(name);
    if (!line) lines.set(name, (line = { data: [], marks: [], generation }));
    if (generation !== line.generation) {
      line.data.push({ at: step, value: null });
      line.marks.push(step);
      line.generation = generation;
    }
    const value = Number(text);
    line.data.push({ at: step, value: Number.isFinite(value) ? value : null });
    if (line.data.length > MOST_POINTS) line.data = line.data.filter((each, n) => n % 2 || each.value === null);
  }
}

const short = (value) => (value !== 0 && (Math.abs(value) < 0.01 || Math.abs(value) >= 1e5) ? value.toExponential(1) : Math.abs(value) >= 100 ? value.toFixed(0) : precise(value));
