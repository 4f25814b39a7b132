// One rank: what it does now, its stacks, its last step, and the way to its output and its node.

import { get } from "./api.js";
import { dialog, fill, h, say } from "./dom.js";
import { duration, mebibytes, percent } from "./format.js";
import { lastStep } from "./steps.js";

const DETAILS_MS = 1000;

export class RankPanel {
  constructor(state, name, { output, orders }) {
    Object.assign(this, { state, name, orders, chosen: null, rank: null, details: null });
    this.title = h("h2", {}, "Rank");
    this.badge = h("span", { class: "badge" });
    this.facts = h("dl", { class: "facts small" });
    this.step = h("div", { class: "last-step" });
    this.note = h("p", { class: "muted small" }, "The worst rank now. Select another one on the map or in the table.");
    this.drain = h("button", { type: "button", class: "danger", onclick: () => this.orderNode() });
    this.buttons = h(
      "div", { class: "row" },
      h("button", { type: "button", onclick: () => stacksDialog(name, this.rank) }, "Stacks"),
      h("button", { type: "button", onclick: () => output(this.rank) }, "Output"),
      h("button", { type: "button", onclick: () => this.readStep() }, "Last step"),
      this.drain,
    );
    this.element = h("section", { class: "card panel", "aria-label": "Selected rank" }, h("header", {}, this.title, this.badge), this.note, this.facts, this.buttons, this.step);
    const show = () => this.show();
    state.on("ranks", show);
    state.on("job", show);
    this.show();
    this.timer = setInterval(() => this.read(), DETAILS_MS);
  }

  select(rank) {
    this.chosen = rank;
    this.turnTo(rank);
    this.read();
  }

  turnTo(rank) {
    if (rank !== this.rank) {
      fill(this.step);
      Object.assign(this, { rank, details: null });
      this.turned?.();
    }
    this.show();
  }

  async read() {
    if (this.chosen === null) this.turnTo(worst(this.state));
    if (document.hidden || this.state.job?.is_over || this.rank === null) return;
    const { rank } = this;
    try {
      const details = await get("rank", { job: this.name, rank });
      if (rank === this.rank) this.details = details;
    } catch {
      this.details = null; // the rank does not run now
    }
    this.show();
  }

  show() {
    if (this.closed) return;
    if (this.rank === null) this.rank = worst(this.state);
    const known = this.rank !== null;
    for (const each of [this.badge, this.facts, this.buttons, this.step]) each.hidden = !known;
    this.note.hidden = this.chosen !== null;
    if (!known) return;
    const { state, rank } = this, row = state.byRank.get(rank), node = state.nodeOf(rank);
    say(this.title, `Rank ${rank}`);
    const health = state.summary?.levels.get(rank);
    say(this.badge, row ? health.words : "does not answer");
    this.badge.className = `badge ${row ? ["good", "warn", "bad", ""][health.level] : "bad"}`;
    this.drain.hidden = !this.orders.allowed || !node || state.job.is_over;
    say(this.drain, node?.excluded ? "Resume node" : "Drain node");
    this.put(row ? this.rows(row, node) : [["Node", node?.node || "–"]]);
  }

  rows(row, node) {
    const { column } = this.state, value = (name) => row[column[name]], { details } = this;
    return [
      ["Node", node ? `${node.node}${node.block ? `, ${node.block}` : ""}` : "–"],
      ["Doing", details?.doing || value("phase")],
      details?.message && ["Says", details.message],
      ...(details?.logged || []).slice(0, 8).map(([name, , value]) => [name, value]),
      ["Step", value("known") ? `${value("step").toLocaleString("en")}, ${duration(value("mean_ms") / 1000)} each` : "–"],
      value("own_ms") && ["Own time", `${duration(value("own_ms") / 1000)}, ${value("ratio").toFixed(2)}× that of its peers`],
      ["Communication", percent(value("share"))],
      ["Last sign", value("quiet_s") < 0.1 ? "now" : `${duration(value("quiet_s"))} ago`],
      ["Memory", mebibytes(value("memory_mib"))],
      value("gpu") !== null && ["GPU", `${value("gpu")} %, ${mebibytes(value("gpu_memory_mib"))}`],
      ["Process", details ? `${details.pid}, started ${value("starts") === 1 ? "once" : `${value("starts")} times`}` : "–"],
      ...(node?.health || []).map((text) => ["Health", text]),
      node?.excluded && ["Excluded", node.excluded],
    ].filter(Boolean);
  }

  put(rows) {
    const text = JSON.stringify(rows);
    if (text === this.text) return;
    this.text = text;
    fill(this.facts, rows.map(([label, words]) => [h("dt", {}, label), h("dd", {}, words)]));
  }

  async readStep() {
    fill(this.step, h("p", { class: "muted small" }, "Reading …"));
    fill(this.step, await lastStep(this.name, this.rank));
  }

  orderNode() {
    const node = this.state.nodeOf(this.rank);
    if (node) this.orders.ask(node.excluded ? "resume" : "drain", node.node);
  }

  close() {
    this.closed = true;
    clearInterval(this.timer);
  }
}

// The rank with the worst level; of those, the one with the longest own time, and then the one that is most behind.
export function worst({ rows, summary }) {
  let found = null, most = null;
  for (const [rank] of rows) {
    const { level, ratio, behind } = summary.levels.get(rank);
    const now = [level, ratio, behind], n = most ? now.findIndex((value, at) => value !== most[at]) : 0;
    if (!most || (n >= 0 && now[n] > most[n])) [found, most] = [rank, now];
  }
  return found;
}

export function stacksDialog(name, rank) {
  const text = h("pre", { class: "block", tabindex: "0" }, "Reading …");
  const words = h("span", { class: "muted" });
  const read = async () => {
    again.disabled = true;
    try {
      const found = await get("stacks", { job: name, rank });
      words.textContent = `on ${found.node}, at ${new Date().toLocaleTimeString()}`;
      text.textContent = found.problem || found.text;
    } catch (problem) {
      text.textContent = problem.message;
    }
    again.disabled = false;
  };
  const again = h("button", { type: "button", onclick: read }, "Read again");
  dialog(`Stacks of rank ${rank}`, [h("div", { class: "row" }, words, h("span", { class: "spacer" }), again), text]);
  read();
}
