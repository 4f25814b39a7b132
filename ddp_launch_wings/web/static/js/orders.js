// Orders to a job. Each is confirmed in a dialog with a reason, and the journal of the job shows who gave it.

import { current, post } from "./api.js";
import { announce, dialog, fill, h } from "./dom.js";

const WORDS = {
  checkpoint: ["Take a checkpoint", "All ranks take a checkpoint and go on. The script must watch for requests, as scripts with ddp.elastic do."],
  restart: ["Restart", "All ranks are stopped and started again. Steps since the last checkpoint are repeated."],
  abort: ["Abort", "The job ends, and its ranks are stopped. This cannot be undone."],
  drain: ["Drain", "The node is taken out of the job. A spare node takes its place, or the job goes on with fewer nodes."],
  resume: ["Resume", "The node may take part in the job again."],
};
const DANGEROUS = new Set(["abort", "restart", "drain"]);

export class Orders {
  constructor(state, name) {
    Object.assign(this, { state, name });
    const button = (action) => h("button", { type: "button", class: action === "abort" ? "danger" : "", onclick: () => this.ask(action) }, WORDS[action][0]);
    this.element = h("div", { class: "row", role: "group", "aria-label": "Orders" }, ["checkpoint", "restart", "abort"].map(button));
    this.element.hidden = true;
    state.on("job", () => (this.element.hidden = !this.allowed || state.job.is_over));
  }

  // The service refuses orders of others; they are not offered either.
  get allowed() {
    return current().may_control;
  }

  ask(action, node = "") {
    const [title, words] = WORDS[action], what = `${title} ${node || this.name}`;
    const reason = h("textarea", { maxlength: 400, placeholder: "for the journal of the job" });
    const problem = h("div", { role: "alert" });
    const confirm = h("button", { type: "submit", class: `primary ${DANGEROUS.has(action) ? "danger" : ""}` }, what);
    const form = h(
      "form", { class: "content" },
      h("p", {}, words),
      h("label", {}, "Reason", reason),
      h("p", { class: "small muted" }, `The journal shows that it was ${current().name}.`),
      problem,
      h("footer", {}, h("button", { type: "button", onclick: () => box.close() }, "Cancel"), confirm),
    );
    const box = dialog(`${what}?`, form, { narrow: true });
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      confirm.disabled = true;
      fill(problem, h("p", { class: "muted" }, action === "checkpoint" ? "Waiting for the ranks …" : "Sending …"));
      try {
        const found = await post("order", { job: this.name, action, reason: reason.value, ...(node ? { node } : {}) });
        if (!found.silent.length) {
          box.close();
          return announce(`${what}: done`);
        }
        fill(problem, h("p", { class: "problem" }, found.silent.slice(0, 3).join("; ")));
      } catch (error) {
        fill(problem, h("p", { class: "problem" }, error.message));
      }
      confirm.disabled = false;
    });
    reason.focus();
  }
}
