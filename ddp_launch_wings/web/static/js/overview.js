// The figures at the top, and the charts.

import { fill, h, say } from "./dom.js";
import { Chart } from "./chart.js";
import { GROUPS, goodput, intervals } from "./figures.js";
import { duration, percent, precise } from "./format.js";

export function tiles(state) {
  const tile = (name) => {
    const value = h("dd", {}), more = h("dd", { class: "more" });
    return { value, more, element: h("div", { class: "tile" }, h("dt", {}, name), value, more) };
  };
  const [step, rate, spread, good, comm, stops] = ["Step", "Throughput", "Step time", "Goodput", "Communication", "Restarts"].map(tile);
  const put = (tile, value, more) => {
    say(tile.value, value);
    say(tile.more, more);
  };
  const show = () => {
    const { summary, job, points } = state;
    if (!job) return;
    const found = intervals(points.slice(-4)), last = found.findLast((each) => each.rate !== null);
    const middle = (summary?.middle || 0) / 1000, known = summary && summary.last > 0;
    const even = known && summary.first === summary.last;
    put(step, known ? summary.last.toLocaleString("en") : "–", known ? (even ? "all ranks" : `slowest at ${summary.first.toLocaleString("en")}`) : "no steps yet");
    put(rate, last ? `${precise(last.rate)} /s` : middle ? `${precise(1 / middle)} /s` : "–", "steps of the job");
    put(spread, duration(middle), summary?.own[1] ? `own time of a rank ${duration(summary.own[0] / 1000)} to ${duration(summary.own[1] / 1000)}` : "median of all ranks");
    put(good, percent(goodput(points) ?? job.goodput), found.length ? `${percent(found.at(-1).goodput)} in the last seconds` : "since the start");
    put(comm, percent(summary?.share ?? null), found.length ? `${percent(found.at(-1).waiting)} is waiting for slower ranks` : "of the time in collectives");
    put(stops, String(job.restarts), job.heals ? `${job.heals} healed in place` : `generation ${job.generation}`);
  };
  for (const kind of ["job", "ranks", "points"]) state.on(kind, show);
  return h("dl", { class: "tiles" }, [step, rate, spread, good, comm, stops].map((each) => each.element));
}

export function charts(state, signal) {
  const rate = new Chart("Throughput", [["Steps", "c1", (each) => each.rate]], { text: (value) => `${precise(value)} /s`, note: "Steps of the job per second" }, signal);
  const step = new Chart("Step time", [["Step time", "c2", (each) => each.step_s]], { text: duration, note: "Mean of all ranks" }, signal);
  const comm = new Chart(
    "Communication",
    [
      ["Exposed", "c4", (each) => each.exposed],
      ["Hidden", "c2", (each) => each.hidden],
      ["Waiting for others", "c3", (each) => each.waiting],
    ],
    { text: percent, note: "Share of the time of all ranks. Hidden: behind computation" },
    signal,
  );
  const good = new Chart(
    "Goodput",
    GROUPS.map(([name, shade], n) => [name, shade, (each) => each.shares[n]]),
    { text: percent, most: 1, stacked: true },
    signal,
  );
  const show = () => {
    const data = intervals(state.points);
    const marks = state.notes.filter((note) => note.kind === "stopping").map((note) => note.at);
    for (const chart of [rate, step, comm, good]) chart.show(data, marks);
    say(good.now, percent(goodput(state.points)));
  };
  state.on("points", show);
  const words = h("p", { class: "small muted" });
  state.on("job", () => say(words, state.job.time));
  return fill(h("section", { class: "charts", "aria-label": "Over time" }), [rate, step, comm, good].map((chart) => chart.element), words);
}
