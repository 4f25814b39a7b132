// The story of a failure, as `ddpctl why` tells it: what failed, the evidence, what was decided, and how long each part took.

import { get } from "./api.js";
import { dialog, fill, h } from "./dom.js";
import { duration } from "./format.js";

const PARTS = [
  ["detect", "c5"], ["stop", "c3"], ["meet", "c4"], ["fork", "c6"], ["init", "c1"], ["first_step", "c2"], ["redo", "bad"],
];

export async function storyDialog(name, generation = 0) {
  const box = h("div", { class: "story" }, h("p", { class: "muted" }, "Reading …"));
  dialog("Why it failed", box);
  try {
    const story = await get("why", { job: name, ...(generation ? { generation } : {}) });
    fill(box, story ? told(story, name) : h("p", {}, "Nothing has failed."));
  } catch (problem) {
    fill(box, h("p", { class: "problem", role: "alert" }, problem.message));
  }
}

function told(story, name) {
  const rows = story.rows.filter(([label]) => label !== "job");
  return [
    h("p", { class: "muted" }, `${name}, generation ${story.generation}`),
    h("dl", { class: "facts" }, rows.map(([label, text]) => [h("dt", {}, label), h("dd", { class: label === "what failed" ? "strong" : "" }, text)])),
    parts(story.parts),
    story.traceback && h("section", {}, h("h3", {}, story.is_hang ? "Stacks" : "What it printed"), h("pre", { class: "block", tabindex: "0" }, story.traceback)),
  ];
}

// How long each part of the restart took, as a bar.
function parts(seconds) {
  const known = PARTS.filter(([part]) => seconds[part] !== null);
  if (!known.length) return h("p", { class: "muted" }, "How long the restart took is not known.");
  const whole = known.reduce((total, [part]) => total + seconds[part], 0);
  const bar = h("div", { class: "parts", "aria-hidden": "true" }, known.map(([part, shade]) => {
    const piece = h("span", { class: `patch ${shade}` });
    piece.style.flexGrow = String(Math.max(seconds[part], whole / 200));
    return piece;
  }));
  const words = ([part]) => part.replace("_", " ");
  return h(
    "section", {},
    h("h3", {}, `The restart took ${duration(whole)}`),
    bar,
    h("ul", { class: "legend small" }, known.map((each) => h("li", { class: "item" }, h("span", { class: `patch ${each[1]}` }), `${words(each)} ${duration(seconds[each[0]])}`))),
  );
}
