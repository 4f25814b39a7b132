// One whole step of a rank: its phases, and below them its collectives, each where and as long as it ran.
//
// A collective is exposed while the rank waits for it (phase "communicate"), and hidden behind computation otherwise.

import { get } from "./api.js";
import { h } from "./dom.js";
import { duration, percent } from "./format.js";

const SHADES = { data: "c5", forward: "c1", backward: "c4", communicate: "c3", optimizer: "c6", checkpoint: "bad", evaluation: "bad" };
const MOST_LANES = 24;

export async function lastStep(name, rank) {
  try {
    const step = await get("step", { job: name, rank });
    return step.problem ? h("p", { class: "muted small" }, step.problem) : drawn(step);
  } catch (problem) {
    return h("p", { class: "problem small", role: "alert" }, problem.message);
  }
}

function drawn(step) {
  const whole = step.duration_s || 1;
  const exposedSpans = step.phases.filter(([phase]) => phase === "communicate").map(([, start, end]) => [start, end]);
  const calls = step.calls.map((call) => ({ ...call, end: Math.min(whole, call.end_s ?? whole), start: Math.max(0, call.start_s) })).filter((call) => call.end > call.start);
  const all = covered(calls.map((call) => [call.start, call.end]));
  const exposed = overlap(all, exposedSpans), busy = length(all), hidden = Math.max(0, busy - exposed);
  const bar = (start, end, shade, words) => {
    const piece = h("span", { class: `span ${shade}`, title: words });
    piece.style.left = `${(100 * start) / whole}%`;
    piece.style.width = `${Math.max(0.4, (100 * (end - start)) / whole)}%`;
    return piece;
  };
  const phases = step.phases.map(([phase, start, end]) => bar(start, end, SHADES[phase] || "c7", `${phase}, ${duration(end - start)}`));
  const lanes = calls.slice(0, MOST_LANES).map((call, n) =>
    h("div", { class: "lane" }, bar(call.start, call.end, "c2", `${call.op} ${n + 1}: ${size(call.bytes)}, ${duration(call.end - call.start)}, from ${duration(call.start)}`)));
  const words = busy
    ? `Communication ${duration(busy)} in ${calls.length} collective${calls.length === 1 ? "" : "s"}: ${duration(hidden)} hidden, ${duration(exposed)} exposed (${percent(hidden / busy)} hidden)`
    : "No collective was seen in this step.";
  return [
    h("h3", {}, `Step ${step.step.toLocaleString("en")}, ${duration(step.duration_s)}`),
    h("div", { class: "lanes", role: "img", "aria-label": `${words}. Phases: ${step.phases.map(([phase, start, end]) => `${phase} ${duration(end - start)}`).join(", ")}` }, h("div", { class: "lane phases" }, phases), lanes),
    h("div", { class: "axis small muted" }, h("span", {}, "0"), h("span", {}, duration(whole))),
    h("ul", { class: "legend small" }, [...new Set(step.phases.map(([phase]) => phase))].map((phase) => h("li", { class: "item" }, h("span", { class: `patch ${SHADES[phase] || "c7"}` }), phase)), calls.length > 0 && h("li", { class: "item" }, h("span", { class: "patch c2" }), "bucket or other collective")),
    calls.length > MOST_LANES && h("p", { class: "small muted" }, `${calls.length - MOST_LANES} more collectives are not drawn.`),
    h("p", { class: "small" }, words),
  ];
}

function covered(spans) {
  const found = [];
  for (const [start, end] of spans.sort((a, b) => a[0] - b[0])) {
    const last = found.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else found.push([start, end]);
  }
  return found;
}

const length = (spans) => spans.reduce((total, [start, end]) => total + end - start, 0);

const overlap = (left, right) => left.reduce((total, [a, b]) => total + right.reduce((sum, [c, d]) => sum + Math.max(0, Math.min(b, d) - Math.max(a, c)), 0), 0);

function size(bytes) {
  return bytes < 1 << 20 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / (1 << 20)).toFixed(1)} MiB`;
}
