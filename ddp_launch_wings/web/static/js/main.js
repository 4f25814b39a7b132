// The frame: session, addresses of views, and the bar at the top.

import { current, enter, get, post } from "./api.js";
import { fill, h, say } from "./dom.js";
import { jobView } from "./job.js";
import { jobsView } from "./jobs.js";
import { loginFromUrl, loginView } from "./login.js";
import { startTheme, themeButton } from "./theme.js";

const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
const connection = document.getElementById("connection");
const account = document.getElementById("account");
let leave = () => {};

const frame = {
  state: (state) => say(connection, state === "lost" ? "Connection lost. Trying again …" : ""),
  refused: (problem) => showLogin(problem.message),
};

function showLogin(problem = "") {
  leave();
  leave = () => {};
  fill(account, themeButton());
  fill(crumbs);
  frame.state("live");
  document.title = "Log in – ddp-launch";
  loginView(main, start, problem);
}

function showAccount() {
  const { name, role } = current();
  const logout = async () => {
    await post("logout", {});
    enter(null);
    showLogin();
  };
  fill(
    account,
    h("span", {}, h("span", { class: "muted" }, `${role}, `), name),
    themeButton(),
    h("button", { type: "button", onclick: logout }, "Log out"),
  );
}

function route() {
  if (!current()) return;
  const found = /^#\/job\/([^/]+)$/.exec(location.hash);
  const { only } = current();
  const job = found ? decodeURIComponent(found[1]) : only;
  leave();
  frame.state("live");
  if (job) {
    const back = only ? null : h("a", { href: "#/" }, "Jobs");
    fill(crumbs, back, back && " / ", h("span", { class: "here" }, job));
    document.title = `${job} – ddp-launch`;
    leave = jobView(main, job, frame);
  } else {
    fill(crumbs);
    document.title = "Jobs – ddp-launch";
    leave = jobsView(main, frame);
  }
  main.focus({ preventScroll: true });
}

async function start() {
  showAccount();
  route();
}

startTheme();
window.addEventListener("hashchange", async () => {
  if (location.hash.startsWith("#login=")) location.reload();
  else route();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address after the # is that of a view
  main.focus();
});
const problem = await loginFromUrl();
if (!current()) {
  try {
    enter(await get("session"));
  } catch (error) {
    showLogin(problem || (error.status === 401 ? "" : error.message));
  }
}
if (current()) start();
