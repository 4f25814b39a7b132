// A stream of events that survives lost connections, restarts of the service, and tabs in the background.
//
// The browser reconnects by itself after a broken connection, and sends the id of the last event. It gives up after an
// answer other than 200, as a service that starts may send. Then this code connects again, and passes the id on.
//
// A tab that nobody sees closes its stream after a while: a browser opens at most six connections to a host.

import { probe } from "./api.js";

const HIDDEN_MS = 20_000;
const LONGEST_MS = 8_000;
const FINAL = new Set([401, 403, 404]);
const SILENT_MS = 35_000; // the service sends something every ten seconds

export class Live {
  // `events`: a function for each kind. `state` is told "live" or "lost". `refused` gets the reason if trying again is of no use.
  constructor(path, query, events, { state = () => {}, refused = () => {} } = {}) {
    Object.assign(this, { path, query, events, state, refused });
    this.last = "";
    this.pause = 500;
    this.seen = () => (document.hidden ? this.hide() : this.show());
    document.addEventListener("visibilitychange", this.seen);
    this.watch = setInterval(() => this.source && Date.now() - this.heard > SILENT_MS && this.again(), 5_000);
    this.open();
  }

  open() {
    const query = new URLSearchParams({ ...this.query, ...(this.last ? { after: this.last } : {}) });
    const source = new EventSource(`api/${this.path}?${query}`);
    this.source = source;
    this.heard = Date.now();
    source.onopen = () => {
      this.pause = 500;
      this.heard = Date.now();
      this.state("live");
    };
    source.onerror = () => {
      this.state("lost");
      if (source.readyState === EventSource.CLOSED) this.again();
    };
    for (const [kind, take] of Object.entries(this.events)) {
      source.addEventListener(kind, (event) => {
        this.heard = Date.now();
        if (event.lastEventId) this.last = event.lastEventId;
        take(JSON.parse(event.data));
      });
    }
    source.addEventListener("still-here", () => (this.heard = Date.now()));
  }

  async again() {
    this.stop();
    this.state("lost");
    this.timer = setTimeout(async () => {
      try {
        await probe(`${this.path}?${new URLSearchParams(this.query)}`); // an EventSource does not tell the reason
      } catch (problem) {
        if (FINAL.has(problem.status)) return this.refused(problem);
      }
      if (!this.closed && !document.hidden) this.open();
    }, this.pause);
    this.pause = Math.min(LONGEST_MS, this.pause * 2);
  }

  hide() {
    clearTimeout(this.hiding);
    this.hiding = setTimeout(() => this.stop(), HIDDEN_MS);
  }

  show() {
    clearTimeout(this.hiding);
    if (!this.source && !this.closed) this.open();
  }

  stop() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  close() {
    this.closed = true;
    this.stop();
    clearTimeout(this.hiding);
    clearInterval(this.watch);
    document.removeEventListener("visibilitychange", this.seen);
  }
}
