// What has happened: a strip on which failures, restarts, heals and decisions have their places, and a list.

import { arrange, fill, h, say } from "./dom.js";
import { moment } from "./format.js";
import { storyDialog } from "./story.js";

const SHOWN = 200, MARKS = 60;
const KINDS = {
  decision: ["bad", "Decision"], ended: ["info", "End"], lost: ["bad", "Node lost"], excluded: ["bad", "Node excluded"],
  straggler: ["warn", "Slow rank"], "keeps-up": ["good", "Fast again"], health: ["warn", "Health"], sealed: ["good", "Ranks start"],
  checkpoint: ["info", "Checkpoint"], profile: ["info", "Profile"], resized: ["info", "Resized"], readmitted: ["info", "Node readmitted"],
  "cannot-heal": ["warn", "No heal"], "first-step": ["good", "First step"], left: ["warn", "Node left"], joined: ["info", "Node joined"],
  stopping: ["warn", "Stop"], stopped: ["info", "Stopped"], running: ["good", "Running"], resumed: ["info", "Read from the store"],
};
const ON_THE_STRIP = new Set(["decision", "ended", "lost", "excluded", "straggler", "health", "sealed", "checkpoint", "resized"]);
const CALM = /^(finish|grow)/;

const isCalm = (note) => note.kind === "decision" && CALM.test(note.text);
const kindOf = (note) => (isCalm(note) ? ["good", "Decision"] : KINDS[note.kind] || ["info", note.kind]);
const isHeal = (note) => note.kind === "decision" && note.text.startsWith("heal");

export function timeline(state, name) {
  const strip = h("ol", { class: "strip", "aria-label": "Events over time" });
  const list = h("ol", { class: "events" });
  const filter = h("select", { "aria-label": "Events to show", onchange: () => show() },
    h("option", { value: "important" }, "Important events"), h("option", { value: "all" }, "All events"));
  const story = h("button", { type: "button", onclick: () => storyDialog(name) }, "Why did it fail last?");
  const element = h(
    "section", { class: "card", "aria-label": "Time line" },
    h("header", {}, h("h2", {}, "Time line"), story, filter),
    strip,
    h("div", { class: "scroll events-box", tabindex: "0", role: "region", "aria-label": "List of events" }, list),
  );
  // An entry stays the same element: a click on its button would be lost if it was replaced meanwhile.
  const entries = new WeakMap(), nothing = h("li", { class: "muted" }, "Nothing has happened yet.");
  const entryOf = (note) => {
    if (!entries.has(note)) entries.set(note, entry(note, name));
    return entries.get(note);
  };
  const show = () => {
    story.hidden = !state.job?.failures.length && !state.job?.decisions.some((each) => each.is_failure);
    const important = state.notes.filter((note) => ON_THE_STRIP.has(note.kind));
    const shown = (filter.value === "all" ? state.notes : important).slice(-SHOWN).reverse();
    arrange(list, shown.length ? shown.map(entryOf) : [nothing]);
    drawStrip(strip, important.slice(-SHOWN), name);
  };
  state.on("notes", show);
  state.on("job", () => (story.hidden = !state.job.failures.length && !state.job.decisions.some((each) => each.is_failure)));
  return element;
}

function entry(note, name) {
  const [shade, title] = kindOf(note);
  const opens = note.kind === "decision" && !isCalm(note);
  return h(
    "li", {},
    h("time", { class: "mono muted" }, moment(note.at)),
    h("span", { class: `badge ${isHeal(note) ? "warn" : shade}` }, isHeal(note) ? "Heal" : title),
    h("span", { class: "words" }, note.text),
    opens && h("button", { type: "button", class: "small", "aria-label": `Story of generation ${note.generation}`, onclick: () => storyDialog(name, note.generation) }, "Story"),
  );
}

// Shares of the time between the first event and the last. Marks that would overlap move apart.
const LEAST = 1.4;

function places(notes) {
  const first = notes[0].at, span = Math.max(1, notes.at(-1).at - first);
  const found = [];
  for (const note of notes) found.push(Math.max((found.at(-1) ?? -LEAST) + LEAST, ((note.at - first) / span) * 100));
  let next = 100 + LEAST;
  for (let n = found.length - 1; n >= 0; n--) next = found[n] = Math.min(found[n], next - LEAST);
  return found;
}

function drawStrip(strip, notes, name) {
  strip.hidden = notes.length < 2;
  if (notes.length < 2) return fill(strip);
  notes = notes.slice(-MARKS);
  const found = places(notes);
  fill(strip, notes.map((note, n) => {
    const [shade, title] = kindOf(note);
    const words = `${title}, ${moment(note.at)}: ${note.text}`;
    const opens = note.kind === "decision" && !isCalm(note);
    const mark = opens
      ? h("button", { type: "button", class: `mark ${isHeal(note) ? "warn" : shade}`, title: words, "aria-label": words, onclick: () => storyDialog(name, note.generation) })
      : h("span", { class: `mark ${shade}`, title: words }, h("span", { class: "unseen" }, words));
    const item = h("li", {}, mark);
    item.style.left = `${found[n]}%`;
    return item;
  }));
  return strip;
}
