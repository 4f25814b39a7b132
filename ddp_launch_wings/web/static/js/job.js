// One job. This module puts the parts of the view together; each part listens to the state that it shows.

import { fill, h, say } from "./dom.js";
import { count, kindOfPhase } from "./format.js";
import { Live } from "./live.js";
import { Logged } from "./logged.js";
import { Logs } from "./logs.js";
import { NodeCharts } from "./node.js";
import { Orders } from "./orders.js";
import { charts, tiles } from "./overview.js";
import { RankPanel } from "./rank.js";
import { Ranks } from "./ranks.js";
import { State } from "./state.js";
import { timeline } from "./timeline.js";
import { WorldMap } from "./worldmap.js";

const SILENT_SHOWN = 3;

export function jobView(main, name, frame) {
  const state = new State(), stop = new AbortController();
  const orders = new Orders(state, name), logs = new Logs(state, name);
  const output = (rank) => {
    logs.show([rank]);
    logs.element.scrollIntoView({ block: "nearest" });
    logs.box.focus({ preventScroll: true });
  };
  const panel = new RankPanel(state, name, { output, orders }), node = new NodeCharts(state, name, panel, stop.signal);
  const map = new WorldMap(state, (rank) => panel.select(rank), stop.signal);
  const ranks = new Ranks(state, (rank) => {
    map.mark(rank);
    panel.select(rank);
    panel.element.scrollIntoView({ block: "nearest" });
  });
  fill(
    main,
    head(state, name, orders), notices(state), tiles(state),
    h("div", { class: "world" }, h("div", {}, map.element, new Logged(state, stop.signal).element, charts(state, stop.signal), node.element), panel.element),
    timeline(state, name),
    ranks.element, logs.element,
  );
  const live = new Live("watch", { job: name }, { ...state.events(), gone: (why) => gone(main, why.reason) }, {
    ...frame,
    refused: (problem) => (problem.status === 401 ? frame.refused(problem) : gone(main, problem.message)),
  });
  return () => {
    live.close();
    logs.close();
    panel.close();
    state.close();
    stop.abort();
  };
}

function head(state, name, orders) {
  const badge = h("span", { class: "badge" }), facts = h("span", { class: "muted" });
  state.on("job", ({ job }) => {
    badge.className = `badge ${kindOfPhase(job.phase)}`;
    say(badge, job.phase);
    say(facts, `generation ${job.generation}, ${count(job.ranks, "rank")} on ${count(job.nodes, "node")}`);
  });
  return h("div", { class: "head" }, h("h1", {}, name), badge, facts, h("span", { class: "spacer" }), orders.element);
}

// What a person should know at a glance: the end of the job, nodes that do not answer, trouble of nodes.
function notices(state) {
  const box = h("div", { role: "status" });
  let shown = "";
  const show = () => {
    const { job, silent } = state;
    if (!job) return;
    const trouble = job.where.flatMap((node) => node.health.map((text) => `${node.node}: ${text}`));
    const late = job.where.filter((node) => node.present && node.late_s).map((node) => `${node.node}: no heartbeat for ${node.late_s} s`);
    const all = [...(job.is_over ? [] : silent), ...trouble, ...late];
    const words = [job.reason && job.phase !== "running" ? job.reason : "", ...all.slice(0, SILENT_SHOWN)].filter(Boolean);
    if (all.length > SILENT_SHOWN) words.push(`and ${all.length - SILENT_SHOWN} more`);
    if (words.join() === shown) return;
    shown = words.join();
    fill(box, words.length > 0 && h("ul", { class: `notice ${job.phase === "failed" ? "bad" : ""}` }, words.map((text) => h("li", {}, text))));
  };
  state.on("job", show);
  state.on("ranks", show);
  return box;
}

function gone(main, words) {
  fill(main, h("section", { class: "card empty" }, h("p", {}, words), h("p", {}, h("a", { href: "#/" }, "All jobs"))));
}
