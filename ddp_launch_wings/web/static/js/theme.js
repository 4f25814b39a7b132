// Light or dark: as the system says, until a user chooses.

import { h } from "./dom.js";

const system = matchMedia("(prefers-color-scheme: dark)");
const changed = new EventTarget();

const chosen = () => {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null; // storage is switched off
  }
};

function apply() {
  document.documentElement.dataset.theme = chosen() || (system.matches ? "dark" : "light");
  changed.dispatchEvent(new Event("change"));
}

export function startTheme() {
  apply();
  system.addEventListener("change", apply);
}

export function themeButton() {
  const toggle = () => {
    try {
      localStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    } catch {
      document.documentElement.dataset.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      return;
    }
    apply();
  };
  return h("button", { class: "plain", type: "button", "aria-label": "Light or dark", title: "Light or dark", onclick: toggle }, "◐");
}

// Colors for a canvas, which knows no CSS. Read once for each theme.
let colors = null;
changed.addEventListener("change", () => (colors = null));

export function color(name) {
  if (!colors) colors = { style: getComputedStyle(document.documentElement), known: {} };
  return (colors.known[name] ??= colors.style.getPropertyValue(`--${name}`).trim());
}

export const whenThemeChanges = (call, signal) => changed.addEventListener("change", call, { signal });
