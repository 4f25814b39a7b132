// The list of jobs.

import { fill, h } from "./dom.js";
import { duration, kindOfPhase, moment, percent } from "./format.js";
import { Live } from "./live.js";

const ORDER = { running: 0, stopping: 1, storing: 2, forming: 3, failed: 4, succeeded: 4 };

export function jobsView(main, frame) {
  const body = h("tbody");
  const count = h("span", { class: "muted" });
  const table = h(
    "table",
    {},
    h("caption", { class: "unseen" }, "Jobs of this service"),
    h(
      "thead",
      {},
      h("tr", {}, ...["Job", "State", "Ended", "Duration", "Goodput", "Nodes", "Ranks", "Generation", "Restarts", "Heals", "Why"].map((name, n) =>
        h("th", { scope: "col", class: n > 1 && n < 10 ? "number" : "" }, name))),
    ),
    body,
  );
  const empty = h("p", { class: "empty" }, "No jobs yet. Start one with ", h("code", {}, "ddp-launch --rendezvous HOST:PORT ..."), ".");
  const list = h("section", { class: "card jobs scroll", tabindex: "0", "aria-label": "Jobs" });
  fill(main, h("div", { class: "head" }, h("h1", {}, "Jobs"), count), list);

  const show = ({ jobs, elsewhere }) => {
    jobs.sort((a, b) => (ORDER[a.phase] ?? 9) - (ORDER[b.phase] ?? 9) || b.ended_at - a.ended_at || a.job.localeCompare(b.job));
    const running = jobs.filter((job) => job.phase === "running").length;
    count.textContent = jobs.length ? `${running} of ${jobs.length} running` : "";
    const focused = document.activeElement?.getAttribute?.("href");
    fill(body, jobs.map(row), elsewhere.map(rowElsewhere));
    fill(list, jobs.length + elsewhere.length ? table : empty);
    if (focused) body.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
  };
  const live = new Live("watch-jobs", {}, { jobs: show }, frame);
  return () => live.close();
}

const isOver = (job) => job.phase === "failed" || job.phase === "succeeded";

function row(job) {
  const range = job.min_nodes === job.max_nodes ? job.max_nodes : `${job.min_nodes}–${job.max_nodes}`;
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, h("a", { href: `#/job/${encodeURIComponent(job.job)}` }, job.job)),
    h("td", {}, h("span", { class: `badge ${kindOfPhase(job.phase)}` }, job.phase)),
    h("td", { class: "number" }, job.ended_at ? moment(job.ended_at) : "–"),
    h("td", { class: "number" }, job.began_at ? duration((job.ended_at || (isOver(job) ? 0 : Date.now() / 1000)) - job.began_at) : "–"),
    h("td", { class: "number" }, percent(job.goodput)),
    h("td", { class: "number" }, `${job.nodes} / ${range}`),
    h("td", { class: "number" }, job.ranks.toLocaleString("en")),
    h("td", { class: "number" }, String(job.generation)),
    h("td", { class: "number" }, String(job.restarts)),
    h("td", { class: "number" }, String(job.heals)),
    h("td", { class: "reason", title: job.reason }, job.reason),
  );
}

// The page of a replica knows only the names of the jobs of the others.
function rowElsewhere({ job, replica }) {
  const where = replica ? `served by the replica at ${replica}: open the page of that replica` : "another replica serves it";
  return h(
    "tr",
    { class: "muted" },
    h("th", { scope: "row" }, job),
    h("td", {}, h("span", { class: "badge" }, "elsewhere")),
    h("td", { colspan: "8" }),
    h("td", { class: "reason", title: where }, where),
  );
}
