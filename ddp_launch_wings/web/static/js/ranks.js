// The table of ranks: sorted by a column, some rows at a time. One listener for all rows.

import { fill, h, say } from "./dom.js";
import { duration, mebibytes, percent, sinceThen } from "./format.js";

const PAGE = 16;
const WORDS = ["well", "slow", "bad", "not known"], SHADES = ["good", "warn", "bad", ""];

// Title, value to sort by, text, and whether it is a number.
const COLUMNS = {
  rank: ["Rank", (row) => row.rank, (row) => String(row.rank), true],
  node: ["Node", (row) => row.node, (row) => row.node, false],
  health: ["Health", (row) => -row.level - (row.level < 3 ? row.ratio / 1e6 : 0), (row) => row.words, false],
  phase: ["Phase", (row) => row.phase, (row) => row.phase, false],
  step: ["Step", (row) => row.step, (row) => (row.known ? row.step.toLocaleString("en") : "–"), true],
  time: ["Own time", (row) => row.ms, (row) => duration(row.ms / 1000), true],
  median: ["/ median", (row) => row.ratio, (row) => (row.ms ? `${row.ratio.toFixed(2)}×` : "–"), true],
  communication: ["Comm.", (row) => row.share ?? -1, (row) => percent(row.share), true],
  memory: ["Memory", (row) => row.memory, (row) => mebibytes(row.memory), true],
  gpu: ["GPU", (row) => row.gpu ?? -1, (row) => (row.gpu === null ? "–" : `${row.gpu} %, ${mebibytes(row.gpuMemory)}`), true],
  quiet: ["Quiet", (row) => row.quiet, (row) => sinceThen(row.quiet), true],
  starts: ["Starts", (row) => row.starts, (row) => String(row.starts), true],
};

export class Ranks {
  constructor(state, select) {
    Object.assign(this, { state, select, by: "health", reversed: false, first: 0 });
    this.body = h("tbody", { onclick: (event) => this.choose(event) });
    this.words = h("span", { class: "small muted" });
    this.heads = Object.entries(COLUMNS).map(([name, [title, , , isNumber]]) =>
      h("th", { scope: "col", class: isNumber ? "number" : "", "data-column": name }, h("button", { type: "button", class: "plain sort" }, title)));
    const head = h("tr", { onclick: (event) => this.sort(event) }, this.heads);
    const turn = (way, title) => h("button", { type: "button", onclick: () => this.turn(way) }, title);
    this.turns = h("div", { class: "row small" }, turn(-1, "‹ Previous"), this.words, turn(1, "Next ›"));
    this.element = h(
      "section", { class: "card", "aria-label": "Ranks" },
      h("header", {}, h("h2", {}, "Ranks"), this.turns),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of ranks" }, h("table", { class: "ranks small" }, h("caption", { class: "unseen" }, "Ranks"), h("thead", {}, head), this.body)),
    );
    const show = () => this.show();
    state.on("ranks", show);
    state.on("job", show);
  }

  sort(event) {
    const name = event.target.closest("th")?.dataset.column;
    if (!name) return;
    this.reversed = this.by === name ? !this.reversed : false;
    this.by = name;
    this.first = 0;
    this.show();
  }

  turn(way) {
    const last = Math.max(0, Math.ceil(this.state.rows.length / PAGE) - 1) * PAGE;
    this.first = Math.max(0, Math.min(last, this.first + way * PAGE));
    this.show();
  }

  choose(event) {
    const rank = event.target.closest("tr")?.dataset.rank;
    if (rank !== undefined) this.select(Number(rank));
  }

  show() {
    const { state } = this, [, key] = COLUMNS[this.by], way = this.reversed ? -1 : 1;
    const rows = state.rows.map((row) => read(row, state));
    rows.sort((a, b) => {
      const [left, right] = [key(a), key(b)];
      return left === right ? a.rank - b.rank : (left < right ? -1 : 1) * way;
    });
    if (this.first >= rows.length) this.first = 0;
    const shown = rows.slice(this.first, this.first + PAGE);
    say(this.words, rows.length ? `${this.first + 1} to ${this.first + shown.length} of ${rows.length.toLocaleString("en")}` : "no rank answers");
    this.turns.hidden = rows.length <= PAGE;
    this.heads.forEach((head) => head.setAttribute("aria-sort", head.dataset.column === this.by ? (this.reversed ? "descending" : "ascending") : "none"));
    shown.forEach((row, n) => this.put(n, row));
    while (this.body.childElementCount > shown.length) this.body.lastChild.remove();
  }

  // Rows stay, and only texts that have changed are replaced: the focus and a selection of text survive.
  put(n, row) {
    let line = this.body.children[n];
    if (!line) {
      line = h("tr", {}, Object.values(COLUMNS).map(([, , , isNumber], at) => {
        const cell = h(at ? "td" : "th", { class: isNumber ? "number" : "" });
        if (!at) cell.append(h("button", { type: "button", class: "plain rank" }));
        if (at === 2) cell.append(h("span"));
        return cell;
      }));
      line.firstChild.scope = "row";
      this.body.append(line);
    }
    line.dataset.rank = row.rank;
    Object.values(COLUMNS).forEach(([, , text], at) => {
      const cell = line.children[at], target = at === 0 || at === 2 ? cell.firstChild : cell;
      say(target, text(row));
    });
    line.firstChild.firstChild.setAttribute("aria-label", `Rank ${row.rank}: details`);
    const shade = `badge ${SHADES[row.level]}`;
    if (line.children[2].firstChild.className !== shade) line.children[2].firstChild.className = shade;
  }
}

function read(row, state) {
  const { column } = state, { level, words, ratio } = state.summary.levels.get(row[0]);
  return {
    rank: row[0], node: state.nodeOf(row[0])?.node || "", level, words: words || WORDS[level], ratio, phase: row[column.phase], step: row[column.step],
    ms: row[column.own_ms], share: row[column.share], memory: row[column.memory_mib], gpu: row[column.gpu],
    gpuMemory: row[column.gpu_memory_mib], quiet: row[column.quiet_s], starts: row[column.starts], known: row[column.known],
  };
}
