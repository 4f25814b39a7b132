// Builds elements. Every text becomes a text node, so nothing that a job says can become markup.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...shown(children));
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...shown(children));
  return element;
}

const shown = (children) => children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false);

// Changes a text only if it is another one: the browser lays out nothing for the others.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
  return element;
}

// As `fill` with these elements, but those that are there already are not taken out and put back.
export function arrange(element, nodes) {
  nodes.forEach((node, n) => element.children[n] !== node && element.insertBefore(node, element.children[n] ?? null));
  while (element.children.length > nodes.length) element.lastElementChild.remove();
}

export function announce(text) {
  say(document.getElementById("announcer"), text);
}

let dialogs = 0;

// A modal dialog, which the browser closes on Escape and in which it keeps the focus.
export function dialog(title, content, { narrow = false, closed = () => {} } = {}) {
  const name = `dialog-title-${++dialogs}`;
  const close = h("button", { type: "button", class: "plain", "aria-label": "Close", onclick: () => box.close() }, "✕");
  const box = h(
    "dialog",
    { class: narrow ? "narrow" : "", "aria-labelledby": name },
    h("header", {}, h("h2", { id: name }, title), close),
    h("div", { class: "content" }, content),
  );
  box.addEventListener("close", () => {
    box.remove();
    closed();
  });
  document.body.append(box);
  box.showModal();
  return box;
}
