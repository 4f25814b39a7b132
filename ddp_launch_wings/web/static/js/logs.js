// The output of the ranks, followed as by `ddpctl logs -f`. Each answer names the places for the next question.

import { post } from "./api.js";
import { fill, h, say } from "./dom.js";
import { time } from "./format.js";

const MOST_LINES = 1000, BATCH = 40, TAIL = 50, AGAIN_MS = 2000, MANY_NODES = 16;

export class Logs {
  constructor(state, name) {
    Object.assign(this, { state, name, ranks: [], places: [], run: 0 });
    this.lines = h("ol", { class: "log mono" });
    this.box = h("div", { class: "scroll log-box", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Output of the ranks" }, this.lines);
    this.words = h("span", { class: "small muted", role: "status" });
    this.which = h("input", { type: "text", size: 10, placeholder: "all", "aria-label": "Ranks, such as 0,4-7", spellcheck: "false" });
    this.follow = h("input", { type: "checkbox", checked: true });
    this.errors = h("input", { type: "checkbox" });
    this.text = h("input", { type: "search", size: 16, placeholder: "search", "aria-label": "Search the output", spellcheck: "false", maxlength: 200 });
    const search = h("form", { class: "row small", role: "search", onsubmit: (event) => this.search(event) }, this.text, h("button", { type: "submit" }, "Search"));
    const form = h("form", { class: "row small", onsubmit: (event) => this.submit(event) },
      h("label", {}, "Ranks ", this.which), h("button", { type: "submit" }, "Show"),
      h("label", {}, this.errors, " only stderr"), h("label", {}, this.follow, " follow"));
    this.element = h("section", { class: "card", "aria-label": "Output" }, h("header", {}, h("h2", {}, "Output"), this.words, search, form), this.box);
    this.errors.addEventListener("change", () => this.lines.classList.toggle("only-stderr", this.errors.checked));
    state.on("job", () => this.begin());
  }

  submit(event) {
    event.preventDefault();
    try {
      this.show(ranksIn(this.which.value));
    } catch (problem) {
      say(this.words, problem.message);
      this.which.focus();
    }
  }

  // All of the output of these ranks is searched. Without a text, it is followed again.
  async search(event) {
    event.preventDefault();
    const text = this.text.value;
    if (!text) return this.show(this.ranks);
    const run = ++this.run; // ends the loop
    this.looping = false;
    this.cancel?.abort();
    say(this.words, "Searching …");
    try {
      const found = await post("logs", { job: this.name, ranks: this.ranks, search: text });
      if (run !== this.run) return;
      fill(this.lines);
      await this.add(found.lines);
      const words = `${found.found.toLocaleString("en")} lines have “${text}”`;
      const last = found.found > found.lines.length ? `; the last ${found.lines.length}` : "";
      say(this.words, [`${words}${last}${found.all ? "" : "; not all of the output was read"}`, ...found.silent.slice(0, 1)].join("; "));
    } catch (problem) {
      if (run === this.run) say(this.words, problem.message);
    }
  }

  // Of these ranks; none: of all.
  show(ranks) {
    this.ranks = ranks;
    this.which.value = ranksText(ranks);
    this.places = [];
    fill(this.lines);
    this.run += 1;
    this.loop(this.run);
  }

  begin() {
    const runs = this.state.job && !this.state.job.is_over && this.state.job.generation > 0;
    if (runs && !this.looping && !this.text.value) this.loop(++this.run);
  }

  async loop(run) {
    this.looping = true;
    const isMine = () => run === this.run && !this.closed;
    while (isMine()) {
      try {
        const found = await this.ask();
        if (!isMine()) return;
        await this.add(found.lines);
        this.places = found.places;
        say(this.words, found.silent.slice(0, 2).join("; "));
        if (!found.more) await pause(this.isWide() || document.hidden ? AGAIN_MS : 100);
      } catch (problem) {
        if (!isMine()) return;
        if (this.state.job?.is_over) break;
        say(this.words, problem.status === 409 ? "" : problem.message);
        await pause(AGAIN_MS);
      }
    }
    if (run === this.run) this.looping = false;
  }

  ask() {
    const wait = this.places.length && !this.isWide() ? (this.placed().length > 1 ? 1 : 10) : 0;
    this.cancel = new AbortController();
    const body = { job: this.name, ranks: this.ranks, places: this.places, tail: TAIL, wait_s: wait };
    return post("logs", body, { signal: this.cancel.signal });
  }

  placed() {
    return this.state.job?.where.filter((node) => node.first !== null) || [];
  }

  isWide() {
    return !this.ranks.length && this.placed().length > MANY_NODES;
  }

  // A long output is added in parts, so that the browser can do other things between them.
  async add(lines) {
    const { run } = this, shown = lines.slice(-MOST_LINES);
    for (let n = 0; n < shown.length && run === this.run; n += BATCH) {
      if (n) await nextFrame();
      this.lines.append(...shown.slice(n, n + BATCH).map(row));
      for (let more = this.lines.childElementCount - MOST_LINES; more > 0; more--) this.lines.firstChild.remove();
    }
    if (this.follow.checked) this.box.scrollTop = 1e9;
  }

  close() {
    this.closed = true;
    this.cancel?.abort();
  }
}

function row(line) {
  const when = line.at ? time(line.at) : "";
  return h(
    "li", { class: line.stream },
    h("span", { class: "muted when" }, when), h("span", { class: "muted who" }, `${line.node}:${line.rank}`),
    line.stream === "stderr" && h("span", { class: "unseen" }, "stderr: "), h("span", { class: "text" }, line.text),
  );
}

const nextFrame = () => new Promise((done) => setTimeout(() => requestAnimationFrame(done)));

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

export function ranksIn(text) {
  const found = [];
  for (const part of text.split(",").map((each) => each.trim()).filter(Boolean)) {
    const range = /^(\d+)(?:-(\d+))?$/.exec(part);
    const first = Number(range?.[1]), last = Number(range?.[2] ?? range?.[1]);
    if (!range || last < first || last - first >= 1000) throw new Error(`“${part}” is not a rank: use numbers and ranges, such as 0,4-7`);
    for (let rank = first; rank <= last; rank++) found.push(rank);
  }
  return found;
}

function ranksText(ranks) {
  const parts = [];
  for (const rank of ranks) {
    const last = parts.at(-1);
    if (last && last[1] === rank - 1) last[1] = rank;
    else parts.push([rank, rank]);
  }
  return parts.map(([first, last]) => (first === last ? first : `${first}-${last}`)).join(",");
}
