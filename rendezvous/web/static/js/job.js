// One job: its state, its nodes, and what has happened.

import { fill, h, say } from "./dom.js";
import { count, kindOfPhase, moment } from "./format.js";
import { Live } from "./live.js";

export function jobView(main, name, frame) {
  const badge = h("span", { class: "badge" });
  const facts = h("span", { class: "muted" });
  const events = h("ol", { class: "events" });
  fill(
    main,
    h("div", { class: "head" }, h("h1", {}, name), badge, facts),
    h("section", { class: "card" }, h("header", {}, h("h2", {}, "Events")), events),
  );
  const showJob = (job) => {
    badge.className = `badge ${kindOfPhase(job.phase)}`;
    say(badge, job.phase);
    say(facts, `generation ${job.generation}, ${count(job.ranks, "rank")} on ${count(job.nodes, "node")}, ${count(job.restarts, "restart")}`);
  };
  const addNote = (note) => events.prepend(h("li", {}, h("time", { class: "mono muted" }, moment(note.at)), " ", note.text));
  const live = new Live("watch", { job: name }, {
    snapshot: (all) => {
      fill(events);
      showJob(all.job);
      all.notes.forEach(addNote);
    },
    job: showJob,
    note: addNote,
  }, frame);
  return () => live.close();
}
