// One adapter, and what can be done with it.

import * as api from "./api.js";
import { copy, el, say, toast } from "./dom.js";
import { ago, bytes, plural, title } from "./format.js";
import { TIERS } from "./adapters.js";

const SURE_MS = 4000;

/** How the backend is told which adapter is meant. */
export const which = (adapter) => (adapter.name ? { lora_name: adapter.name } : { lora_task_id: adapter.lora_task_id });

export class Details {
  /** ask(adapter): take it to the playground; changed(): something was done. */
  constructor(root, { ask, changed }) {
    this._root = root;
    this._ask = ask;
    this._changed = changed;
    this._adapter = null;
    this.isReadOnly = false;
  }

  show(adapter) {
    this._adapter = adapter;
    this._root.hidden = false;
    this._title = el("h2", { id: "details-title" });
    this._facts = el("dl", { class: "facts" });
    this._actions = el("div", { class: "actions" });
    this._root.replaceChildren(
      el("div", { class: "bar" }, this._title, el("span", { class: "grow" }),
        el("button", { type: "button", class: "plain icon", "aria-label": "Close details", on: { click: () => this.hide() } }, "✕")),
      this._facts, this._actions);
    this._draw();
  }

  hide() {
    this._adapter = null;
    this._root.hidden = true;
  }

  update(adapters) {
    if (!this._adapter) return;
    const { lora_task_id, tenant } = this._adapter;
    const latest = adapters.find((other) => other.lora_task_id === lora_task_id && other.tenant === tenant);
    if (!latest) return this.hide();
    if (JSON.stringify(latest) === JSON.stringify(this._adapter)) return;
    this._adapter = latest;
    this._draw();
  }

  _draw() {
    const adapter = this._adapter;
    say(this._title, title(adapter));
    const facts = [
      ["Task id", adapter.lora_task_id, true],
      ["Tenant", adapter.tenant],
      ["Digest", adapter.digest, true],
      ["Tier", `${TIERS[adapter.location] ?? adapter.location}, ${adapter.status.toLowerCase().replaceAll("_", " ")}`],
      ["Size", adapter.bytes ? `${bytes(adapter.bytes)}, rank ${adapter.ranks.join(", ")}` : ""],
      ["Used", [adapter.num_pins && `${plural(adapter.num_pins, "request")} in flight`, adapter.num_hits && plural(adapter.num_hits, "hit"), ago(adapter.last_used_s)].filter(Boolean).join(", ")],
    ];
    this._facts.replaceChildren(...facts.filter(([, value]) => value).flatMap(([name, value, isLong]) => [
      el("dt", {}, name),
      el("dd", isLong ? { class: "mono" } : {}, value,
        isLong && el("button", { type: "button", class: "plain copy", "aria-label": `Copy ${name.toLowerCase()}`, on: { click: () => copy(value) } }, "copy")),
    ]));
    const buttons = [el("button", { type: "button", class: "primary", on: { click: () => this._ask(adapter) } }, "Ask it")];
    if (!this.isReadOnly) buttons.push(...this._operations(adapter));
    // A pressed button keeps the keyboard.
    const focused = this._actions.contains(document.activeElement) ? document.activeElement.dataset.action : null;
    this._actions.replaceChildren(...buttons);
    if (focused) this._actions.querySelector(`[data-action="${focused}"]`)?.focus();
  }

  _operations(adapter) {
    const isRemote = adapter.location === "REMOTE";
    const operation = (label, path, body) => el("button", {
      type: "button", data: { action: path }, on: { click: (event) => this._do(event.target, label, path, body ?? this._named(adapter)) },
    }, label);
    const load = operation("Load into memory", "load", { which: which(adapter) });
    if (isRemote) return [load];
    const pin = adapter.is_pinned ? operation("Unpin", "unpin") : operation("Pin", "pin");
    return [...(adapter.location === "DISK" && !adapter.tenant ? [load] : []), pin, this._unload(adapter)];
  }

  _named(adapter) {
    return { which: { lora_task_id: adapter.lora_task_id }, tenant: adapter.tenant };
  }

  /** Asks twice: requests for the adapter fail from then on. */
  _unload(adapter) {
    let isSure = false;
    const press = (event) => {
      const button = event.target;
      if (isSure) return this._do(button, "Unload", "unload", this._named(adapter));
      isSure = true;
      button.classList.add("danger");
      say(button, "Really unload?");
      setTimeout(() => {
        isSure = false;
        button.classList.remove("danger");
        say(button, "Unload");
      }, SURE_MS);
    };
    return el("button", { type: "button", data: { action: "unload" }, on: { click: press } }, "Unload");
  }

  async _do(button, label, path, body) {
    button.disabled = true;
    try {
      await api.post(path, body);
      toast(`${label}: ${title(this._adapter ?? {})}`);
    } catch (error) {
      toast(error.message, "error");
    }
    button.disabled = false;
    this._changed();
  }
}
