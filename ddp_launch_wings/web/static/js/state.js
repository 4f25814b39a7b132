// What is known of the job that the page shows, and who wants to hear about it.
//
// Views listen to kinds of changes. They draw in the next frame of the browser, and only what has changed since the last
// one, however many events have arrived.

import { current } from "./api.js";
import { addLogged } from "./logged.js";

export const KINDS = ["job", "ranks", "points", "logged", "notes"];

export class State {
  constructor() {
    this.job = null;
    this.rows = [];
    this.silent = [];
    this.points = [];
    this.notes = [];
    this.logged = new Map(); // by name
    this.column = Object.fromEntries((current()?.columns || []).map((name, n) => [name, n]));
    this.listeners = new Map(KINDS.map((kind) => [kind, []]));
    this.changed = new Set();
    this.summary = null;
    this.byRank = new Map();
  }

  on(kind, call) {
    this.listeners.get(kind).push(call);
  }

  // The functions for the events of the stream.
  events() {
    return {
      snapshot: (all) => {
        this.takeRanks(all.ranks);
        this.takeJob(all.job);
        Object.assign(this, { points: all.points, notes: all.notes, logged: new Map() });
        addLogged(this.logged, all.logged);
        this.note(...KINDS);
      },
      job: (job) => {
        this.takeJob(job);
        this.note("job");
      },
      ranks: (ranks) => {
        this.takeRanks(ranks);
        this.note("ranks");
      },
      points: (points) => {
        this.points.push(...points);
        if (this.points.length > 900) this.points = this.points.filter((_, n) => n % 2 === 0);
        this.note("points");
      },
      logged: (points) => {
        addLogged(this.logged, points);
        this.note("logged");
      },
      note: (note) => {
        this.notes.push(note);
        if (this.notes.length > 1000) this.notes.shift();
        this.note("notes");
      },
    };
  }

  takeRanks({ rows, silent }) {
    this.rows = rows;
    this.silent = silent;
    this.byRank = new Map(rows.map((row) => [row[0], row]));
    this.summary = summarized(rows, this.column);
  }

  nodeOf(rank) {
    return this.nodes?.get(rank);
  }

  takeJob(job) {
    this.job = job;
    this.nodes = new Map(); // by rank
    for (const node of job.where) {
      if (node.first === null) continue;
      for (let n = 0; n < node.nproc; n++) this.nodes.set(node.first + n, node);
    }
  }

  note(...kinds) {
    kinds.forEach((kind) => this.changed.add(kind));
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => this.tell());
  }

  // Between two views the browser may do what is due, such as showing what a person types.
  async tell() {
    const kinds = KINDS.filter((kind) => this.changed.has(kind));
    this.changed.clear();
    const calls = new Set(kinds.flatMap((kind) => this.listeners.get(kind)));
    for (const call of calls) {
      call(this);
      await pause();
    }
    this.waiting = null;
    if (this.changed.size) this.note();
  }

  close() {
    cancelAnimationFrame(this.waiting);
    this.listeners.forEach((calls) => calls.splice(0));
  }
}

const pause = () => new Promise((done) => setTimeout(done));

export function median(values) {
  if (!values.length) return 0;
  const sorted = Float64Array.from(values).sort();
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// Level of a rank: 0 well, 1 slow or behind, 2 bad, 3 not known.
export const WELL = 0, SLOW_LEVEL = 1, BAD = 2, UNKNOWN = 3;
const BEHIND = 2, BEHIND_MS = 1000; // nodes answer at different moments, and short steps go on meanwhile

export function summarized(rows, column) {
  const alive = rows.filter((row) => row[column.alive] && row[column.known]);
  const times = alive.map((row) => row[column.mean_ms]).filter((ms) => ms > 0);
  const middle = median(times);
  const last = alive.reduce((most, row) => Math.max(most, row[column.step]), 0);
  const first = alive.reduce((least, row) => Math.min(least, row[column.step]), last);
  const quiet = Math.max(10, (5 * middle) / 1000);
  const shares = alive.map((row) => row[column.share]).filter((share) => share !== null);
  const summary = { middle, last, first, quiet, share: shares.length ? median(shares) : null, own: [0, 0], counts: [0, 0, 0, 0] };
  const own = alive.map((row) => row[column.own_ms]).filter((ms) => ms > 0);
  if (own.length) summary.own = own.reduce(([least, most], ms) => [Math.min(least, ms), Math.max(most, ms)], [own[0], own[0]]);
  summary.levels = new Map();
  for (const row of rows) {
    const found = judged(row, column, summary);
    summary.levels.set(row[0], found);
    summary.counts[found.level] += 1;
  }
  return summary;
}

function judged(row, column, summary) {
  const ratio = row[column.ratio], slow = row[column.slow];
  const behind = row[column.known] ? summary.last - row[column.step] : 0;
  if (!row[column.alive]) return { level: BAD, words: "has ended", ratio, behind };
  if (row[column.phase] === "stopped" || row[column.phase] === "frozen")
    return { level: BAD, words: row[column.phase], ratio, behind };
  if (!row[column.known]) return { level: UNKNOWN, words: "does not report", ratio, behind };
  if (row[column.quiet_s] > summary.quiet)
    return { level: BAD, words: `no progress for ${Math.round(row[column.quiet_s])} s`, ratio, behind };
  if (slow) return { level: slow > 1 ? BAD : SLOW_LEVEL, words: `own time ${ratio.toFixed(2)}× that of its peers`, ratio, behind };
  if (behind > BEHIND && behind * summary.middle > BEHIND_MS) return { level: SLOW_LEVEL, words: `${behind} steps behind`, ratio, behind };
  return { level: WELL, words: "well", ratio, behind };
}
