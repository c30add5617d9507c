// The server's log of its adapters, the latest event first.

import { el, say } from "./dom.js";
import { clock, title } from "./format.js";

const MAX_EVENTS = 200;
const KINDS = {
  uploaded: ["↑", "host", "uploaded"],
  downloaded: ["↓", "host", "fetched from its source"],
  evicted: ["×", "gone", "evicted from host memory"],
  loaded_to_device: ["▸", "device", "on the device"],
  unloaded_from_device: ["◂", "host", "off the device"],
  replaced: ["⇄", "host", "replaced"],
  unloaded: ["×", "gone", "unloaded"],
  spilled_to_disk: ["▾", "disk", "written to disk"],
  deleted_from_disk: ["×", "gone", "deleted from disk"],
  loaded_from_disk: ["▴", "host", "read from disk"],
  fetch_failed: ["!", "gone", "could not be fetched"],
};

export class EventList {
  /** onPick(taskId, tenant): hears of an adapter that shall be shown. */
  constructor(root, onPick) {
    this._root = root;
    this._names = new Map();
    root.addEventListener("click", (event) => {
      const line = event.target.closest(".link")?.closest("li");
      if (line) onPick(line.event.lora_task_id, line.event.tenant);
    });
  }

  /** The adapters by their task ids, as far as they are known now. */
  set names(names) {
    this._names = names;
    for (const line of this._root.children) if (line.event) say(line.querySelector(".link"), this._called(line.event));
  }

  /** events: oldest first. */
  add(events, numMissed) {
    if (numMissed && !this._root.children.length) this._note(`${numMissed.toLocaleString("en-US")} earlier events`);
    for (const event of events) this._root.prepend(this._line(event));
    while (this._root.children.length > MAX_EVENTS) this._root.lastElementChild.remove();
  }

  restart() {
    this._root.replaceChildren();
    this._note("the engine was started again");
  }

  _note(text) {
    this._root.prepend(el("li", { class: "muted" }, text));
  }

  _line(event) {
    const [sign, kind, text] = KINDS[event.kind] ?? ["·", "", event.kind];
    const line = el("li", { data: { kind } },
      el("time", { class: "muted" }, clock(event.time_ns / 1e6)),
      el("span", { class: "sign", "aria-hidden": "true" }, sign),
      el("span", { class: "what" },
        el("button", { type: "button", class: "link", title: event.digest }, this._called(event)), ` ${text}`));
    line.event = event;
    return line;
  }

  _called(event) {
    const name = title(this._names.get(event.lora_task_id) ?? { name: "", lora_task_id: event.lora_task_id });
    return event.tenant ? `${event.tenant}@${name}` : name;
  }
}
