// One adapter, and what can be done with it.

import * as api from "./api.js";
import { copy, el, say, toast } from "./dom.js";
import { ago, bytes, kind, plural, title } from "./format.js";
import { TIERS } from "./adapters.js";

/** How the backend is told which adapter is meant. */
export const which = (adapter) => (adapter.name ? { lora_name: adapter.name } : { lora_task_id: adapter.lora_task_id });

/** What the tier says already. */
const UNTOLD = new Set(["DOWNLOADED", "READY_FOR_USE"]);
const DONE = { load: "is in memory", pin: "is pinned", unpin: "is no longer pinned", unload: "is unloaded" };

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
    this._isSure = false;
    this._root.hidden = false;
    this._title = el("h2", { id: "details-title" });
    this._facts = el("dl", { class: "facts" });
    this._actions = el("div", { class: "actions" });
    this._root.replaceChildren(
      el("div", { class: "bar" }, this._title, el("span", { class: "grow" }),
        el("button", { type: "button", class: "plain icon", "aria-label": "Close details", on: { click: () => this.hide() } }, "✕")),
      this._facts, this._actions);
    this._draw();
    if (matchMedia("(max-width: 1100px)").matches) this._root.scrollIntoView({ block: "nearest" });
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
    // What has the keyboard keeps it.
    const focused = this._root.contains(document.activeElement) ? document.activeElement.dataset.action : null;
    say(this._title, title(adapter));
    const facts = [
      ["Task id", adapter.lora_task_id, true],
      ["Tenant", adapter.tenant],
      ["Digest", adapter.digest, true],
      ["Tier", [TIERS[adapter.location] ?? adapter.location, UNTOLD.has(adapter.status) ? "" : adapter.status.toLowerCase().replaceAll("_", " ")].filter(Boolean).join(", ")],
      ["Size", adapter.bytes ? `${bytes(adapter.bytes)}, ${kind(adapter)} of rank ${adapter.ranks.join(", ")}` : ""],
      ["Used", [adapter.num_pins && `${plural(adapter.num_pins, "request")} in flight`, adapter.num_hits && plural(adapter.num_hits, "hit"), ago(adapter.last_used_s)].filter(Boolean).join(", ")],
    ];
    this._facts.replaceChildren(...facts.filter(([, value]) => value).flatMap(([name, value, isLong]) => [
      el("dt", {}, name),
      el("dd", isLong ? { class: "mono" } : {}, value,
        isLong && el("button", { type: "button", class: "plain copy", data: { action: `copy ${name}` }, "aria-label": `Copy ${name.toLowerCase()}`, on: { click: () => copy(value) } }, "copy")),
    ]));
    const buttons = [el("button", { type: "button", class: "primary", data: { action: "ask" }, on: { click: () => this._ask(adapter) } }, "Ask it")];
    if (!this.isReadOnly) buttons.push(...this._operations(adapter));
    this._actions.replaceChildren(...buttons);
    if (focused) this._root.querySelector(`[data-action="${focused}"]`)?.focus();
  }

  _operations(adapter) {
    const isRemote = adapter.location === "REMOTE";
    const operation = (label, path, body) => el("button", {
      type: "button", data: { action: path }, on: { click: (event) => this._do(event.target, path, body ?? this._named(adapter)) },
    }, label);
    const load = operation("Load into memory", "load", { which: which(adapter) });
    if (isRemote) return [load];
    const pin = adapter.is_pinned ? operation("Unpin", "unpin") : operation("Pin", "pin");
    return [...(adapter.location === "DISK" && !adapter.tenant ? [load] : []), pin, ...this._unload(adapter)];
  }

  _named(adapter) {
    return { which: { lora_task_id: adapter.lora_task_id }, tenant: adapter.tenant };
  }

  /** Asks twice: requests for the adapter fail from then on. */
  _unload(adapter) {
    const button = (label, action, kind, press) => el("button", { type: "button", class: kind, data: { action }, on: { click: press } }, label);
    const sure = (isSure) => () => {
      this._isSure = isSure;
      this._draw();
    };
    if (!this._isSure) return [button("Unload", "unload", "", sure(true))];
    const named = { ...this._named(adapter), ...(adapter.digest && { expected_digest: adapter.digest }) };
    const unload = (event) => this._do(event.target, "unload", named);
    return [button("Really unload?", "unload", "danger", unload), button("Keep it", "keep", "", sure(false))];
  }

  async _do(button, path, body) {
    const name = title(this._adapter);
    button.disabled = true;
    try {
      await api.post(path, body);
      toast(`${name} ${DONE[path]}`);
    } catch (error) {
      toast(error.message, "error");
    }
    button.disabled = false;
    this._changed();
  }
}
