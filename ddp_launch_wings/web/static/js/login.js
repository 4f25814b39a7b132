// The login: with a token of the API, or with the token in the URL that the service has printed.

import { enter, post } from "./api.js";
import { fill, h } from "./dom.js";

export async function loginFromUrl() {
  const found = /^#login=([\w-]+)$/.exec(location.hash);
  if (!found) return "";
  history.replaceState(null, "", location.pathname); // the token must not stay in the history
  try {
    enter(await post("login", { token: found[1] }));
    return "";
  } catch (problem) {
    return problem.message;
  }
}

export function loginView(main, done, problem = "") {
  const words = h("p", { class: "problem", role: "alert" }, problem);
  const token = h("input", { type: "password", name: "token", autocomplete: "off", required: true, spellcheck: "false" });
  const submit = async (event) => {
    event.preventDefault();
    try {
      enter(await post("login", { token: token.value.trim() }));
    } catch (error) {
      words.textContent = error.message;
      token.focus();
      return;
    }
    done();
  };
  fill(
    main,
    h(
      "section",
      { class: "card login" },
      h("h1", {}, "Log in"),
      h("p", { class: "muted" }, "Use a token of the service, or open the URL that was printed at the start."),
      h(
        "form",
        { onsubmit: submit },
        h("label", {}, "Token", token),
        words,
        h("button", { class: "primary", type: "submit" }, "Log in"),
        h("p", { class: "small muted" }, h("code", {}, "ddp-rendezvous token --role viewer ..."), " creates a token that may only look."),
      ),
    ),
  );
  token.focus();
}
