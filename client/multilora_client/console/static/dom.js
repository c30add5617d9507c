// Makes elements. Text goes in as text: nothing here, or anywhere in this page, reads a string as HTML.

/** An element. props: properties, `class`, `data`, `aria-*` and `role`, and `on` with listeners; children: nodes or texts. */
export function el(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "on") for (const [kind, listener] of Object.entries(value)) element.addEventListener(kind, listener);
    else if (name.includes("-") || name === "role" || name === "for" || name === "list") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets a text only where it differs, so that screen readers and selections are left alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const NOTE_MS = 3500;
const MAX_ERRORS = 4;

/** A message. A note goes away by itself; an error stays until it is closed, or until MAX_ERRORS newer ones have come. */
export function toast(text, kind = "note") {
  const isError = kind === "error";
  const close = () => message.remove();
  const message = el("div", { class: `toast ${kind}` }, el("span", {}, text),
    isError && el("button", { type: "button", class: "plain icon", "aria-label": "Close message", on: { click: close } }, "✕"));
  byId("toasts").append(message);
  if (!isError) setTimeout(close, NOTE_MS);
  for (const old of [...byId("toasts").querySelectorAll(".error")].slice(0, -MAX_ERRORS)) old.remove();
}

/** A dialog of the page's own, gone from the document when it closes. build(close): its children. */
export function openDialog(title, build, props = {}) {
  const id = `dialog-${title.toLowerCase().replaceAll(/\W+/g, "-")}`;
  const dialog = el("dialog", { ...props, "aria-labelledby": id });
  const close = () => dialog.close();
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && close());
  dialog.append(
    el("div", { class: "dialog" },
      el("div", { class: "bar" }, el("h2", { id }, title), el("span", { class: "grow" }),
        el("button", { type: "button", class: "plain icon", "aria-label": "Close", on: { click: close } }, "✕")),
      build(close)),
  );
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

const tip = byId("tip");

/** Shows a tip beside a place of the window; lines: texts or elements. */
export function showTip(lines, x, y) {
  tip.replaceChildren(...lines.map((line) => (typeof line === "string" ? el("div", {}, line) : line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x - width / 2, innerWidth - width - 4))}px`;
  tip.style.top = `${y + height + 4 < innerHeight ? y : Math.max(4, y - height - 28)}px`;
}

export function hideTip() {
  tip.hidden = true;
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied");
  } catch {
    toast("The browser does not let this page copy", "error");
  }
}
