// Adapters from this machine to the server: dropped or chosen, named, sent. And adapters from the server's sources.

import * as api from "./api.js";
import { byId, el, openDialog, say, toast } from "./dom.js";
import { bytes } from "./format.js";

const PEFT = ["adapter_config.json", "adapter_model.safetensors"];
const CONVERTED = [["model.lora_config.npy", "model.lora_weights.npy"], ["model.lora_keys.npy", "model.lora_weights.npy"]];
const ORIGIN = "model.lora_origin.json"; // of our own converter, beside the pair
const USE = ["chat_template.jinja", "tokenizer_config.json", "tokenizer.json", "added_tokens.json", "generation_config.json", "multilora.json"];
const TOOLS = "additional_chat_templates/tool_use.jinja"; // the one file on an adapter's use that lies in a folder of its own
const WANTED = new Set([...PEFT, ...CONVERTED.flat(), ORIGIN, ...USE, "tool_use.jinja"]);
const MAX_DEPTH = 4;
const MAX_OTHERS = 200; // files that are looked at only to say what is missing

/** Files of a drop or a choice, as adapters: {folder, files}; a folder of one has its files in it. */
export function findAdapters(entries) {
  const folders = Map.groupBy
    ? Map.groupBy(entries, ({ folder }) => folder)
    : entries.reduce((map, entry) => map.set(entry.folder, [...(map.get(entry.folder) ?? []), entry]), new Map());
  return [...folders].flatMap(([folder, inside]) => {
    const byName = new Map(inside.map(({ file }) => [file.name, file]));
    const names = [...CONVERTED, PEFT].find((wanted) => wanted.every((name) => byName.has(name)));
    if (!names) return [];
    const wanted = [...names, ...USE.filter((name) => byName.has(name)), ...(names !== PEFT && byName.has(ORIGIN) ? [ORIGIN] : [])];
    const tools = entries.find((entry) => `${entry.folder}/${entry.file.name}` === (folder ? `${folder}/${TOOLS}` : TOOLS));
    if (tools) tools.file.sentName = TOOLS;
    return [{ folder, files: [...wanted.map((name) => byName.get(name)), ...(tools ? [tools.file] : [])] }];
  });
}

/** Why there is no adapter among files: the folder that comes closest, and what it lacks. */
function problemOf(entries) {
  const folders = [...new Set(entries.map(({ folder }) => folder))];
  const lacks = folders.map((folder) => {
    const names = new Set(entries.filter((entry) => entry.folder === folder).map(({ file }) => file.name));
    const where = folder ? ` in ${folder}` : "";
    if (names.has("adapter_model.bin") && !names.has(PEFT[1])) return `adapter_model.bin${where} is a pickle, which the server does not read: save with safe_serialization=True`;
    for (const wanted of [PEFT, CONVERTED[0]]) {
      const missing = wanted.filter((name) => !names.has(name));
      if (missing.length === 1) return `${missing[0]} is missing${where}`;
    }
    return "";
  });
  return lacks.find(Boolean) || "a PEFT folder has adapter_config.json and adapter_model.safetensors, a converted adapter its pair of .npy files";
}

/** A name that the server takes: letters, digits, _, . and -, a letter, digit or _ first. */
export const plainName = (text) => text.replaceAll(/[^\w.-]+/g, "-").replace(/^[-.]+/, "").slice(0, 96);

async function entriesOf(transfer) {
  const items = [...transfer.items].filter((item) => item.kind === "file");
  const roots = items.map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!roots.length) return [...transfer.files].map((file) => ({ folder: "", file }));
  const found = [];
  const walk = async (entry, folder, depth) => {
    if (entry.isFile) {
      if (WANTED.has(entry.name) || found.length < MAX_OTHERS) found.push({ folder, file: await new Promise((done, fail) => entry.file(done, fail)) });
    } else if (depth < MAX_DEPTH) {
      const reader = entry.createReader();
      for (;;) { // a reader gives a hundred at a time
        const some = await new Promise((done, fail) => reader.readEntries(done, fail));
        if (!some.length) break;
        for (const inner of some) await walk(inner, folder ? `${folder}/${entry.name}` : entry.name, depth + 1);
      }
    }
  };
  for (const root of roots) await walk(root, "", 0);
  return found;
}

const entriesOfInput = (input) => [...input.files].map((file) => ({
  folder: file.webkitRelativePath.split("/").slice(0, -1).join("/"), file,
}));

export class Uploads {
  /** onDone(): something was sent; ask(adapter): take it to the playground. */
  constructor(onDone, ask) {
    this._onDone = onDone;
    this._ask = ask;
    this.isAllowed = false;
    this.maxBytes = Infinity;
    this._depth = 0;
    this._dialog = null;
    const shows = (event) => this.isAllowed && [...event.dataTransfer.types].includes("Files");
    addEventListener("dragenter", (event) => {
      if (!shows(event)) return;
      this._depth += 1;
      byId("drop").hidden = false;
    });
    addEventListener("dragleave", (event) => {
      if (shows(event) && --this._depth <= 0) this._leave();
    });
    addEventListener("dragover", (event) => event.preventDefault());
    addEventListener("drop", async (event) => {
      event.preventDefault();
      this._leave();
      if (this.isAllowed) this._take(await entriesOf(event.dataTransfer));
      else toast("No upload: the page is read-only, or the server has not answered yet", "error");
    });
  }

  open() {
    if (!this.isAllowed) return;
    if (this._dialog?.open) return;
    this._list = el("div", { class: "uploads" });
    this._problem = el("p", { class: "error", role: "alert" });
    const choose = (id, label, props) => {
      const input = el("input", { type: "file", id, class: "hidden-input", multiple: true, ...props,
        on: { change: () => { this._take(entriesOfInput(input)); input.value = ""; } } });
      return [input, el("label", { class: "button", for: id }, label)];
    };
    this._send = el("button", { type: "button", class: "primary", disabled: true, on: { click: () => this._sendAll() } }, "Upload");
    this._dialog = openDialog("Upload adapters", () => el("div", {},
      el("p", { class: "muted" }, "A PEFT folder (adapter_config.json and adapter_model.safetensors), or the pair model.lora_weights.npy and model.lora_config.npy. Drop it anywhere, or choose:"),
      el("div", { class: "actions left" }, choose("choose-folder", "Folder…", { webkitdirectory: true }), choose("choose-files", "Files…", {})),
      this._problem, this._list,
      el("div", { class: "actions" }, el("button", { type: "button", on: { click: () => this._dialog.close() } }, "Done"), this._send)), { class: "wide" });
  }

  _leave() {
    this._depth = 0;
    byId("drop").hidden = true;
  }

  _take(entries) {
    const found = findAdapters(entries);
    this.open();
    say(this._problem, found.length ? "" : `No adapter among these files: ${problemOf(entries)}.`);
    if (!found.length) return;
    for (const adapter of found) this._list.append(this._row(adapter));
    this._send.disabled = false;
    this._send.focus();
  }

  _row({ folder, files }) {
    const size = files.reduce((sum, file) => sum + file.size, 0);
    const id = `name-${this._list.children.length}`;
    const row = el("div", { class: "upload" });
    const name = el("input", { id, value: plainName(folder.split("/").at(-1) ?? ""), placeholder: "by its content", maxLength: 96, spellcheck: false, autocomplete: "off" });
    const bar = el("progress", { max: 1, value: 0, "aria-label": "Progress" });
    const note = el("span", { class: "muted number", role: "status" }, bytes(size));
    row.append(el("label", { for: id }, "Name"), name, bar, note);
    row.upload = { name, bar, note, files, size, isSent: false };
    return row;
  }

  async _sendAll() {
    this._send.disabled = true;
    const rows = [...this._list.children].map(({ upload }) => upload).filter(({ isSent }) => !isSent);
    for (const row of rows) await this._sendOne(row);
    this._send.disabled = [...this._list.children].every(({ upload }) => upload.isSent);
  }

  async _sendOne(row) {
    const { name, bar, note, files, size } = row;
    const tell = (text, share, kind = "") => {
      say(note, text);
      note.className = `number ${kind || "muted"}`;
      if (share !== null) bar.value = share;
    };
    if (size > this.maxBytes) return tell(`${bytes(size)}, more than ${bytes(this.maxBytes)}`, 0, "error");
    const given = name.value.trim();
    const query = new URLSearchParams(files.map((file) => ["file", `${file.sentName ?? file.name}:${file.size}`]));
    if (/^\d+$/.test(given)) query.set("lora_task_id", given);
    else if (given) query.set("lora_name", given);
    name.disabled = true;
    let failure = null;
    try {
      await api.upload(query, files, (line) => {
        if (line.error) failure = line.error.message;
        else if (line.phase === "sending") tell(`sending ${bytes(line.bytes)} to the server`, 0.75);
        else if (line.phase === "done") {
          row.isSent = true;
          tell(`uploaded, ${line.lora_digest.slice(0, 12)}`, 1, "good");
          const adapter = { name: /^\d+$/.test(given) ? "" : given, lora_task_id: line.lora_task_id, tenant: "", digest: line.lora_digest };
          bar.replaceWith(el("button", { type: "button", on: { click: () => { this._dialog.close(); this._ask(adapter); } } }, "Ask it"));
        }
      }, (share) => tell(`${Math.round(share * 100)} % of ${bytes(size)}`, share / 2));
    } catch (error) {
      failure = error.message;
    }
    if (!row.isSent) {
      name.disabled = false;
      tell(failure ?? "the connection broke", 0, "error");
    }
    this._onDone();
  }
}

/** Has the server fetch an adapter by its name. */
export function openLoadDialog(onDone) {
  const field = (id, label, placeholder) => {
    const input = el("input", { id, placeholder, autocomplete: "off", spellcheck: false });
    return { input, parts: [el("label", { for: id }, label), input] };
  };
  const name = field("load-name", "Name or task id", "acme/pirate");
  const source = field("load-source", "Source", "all of the server's lora_sources");
  const path = field("load-path", "Path", "where the source looks for the name");
  const note = el("p", { class: "muted", role: "status" });
  const button = el("button", { type: "submit", class: "primary" }, "Load");
  const submit = async (event, close) => {
    event.preventDefault();
    const wanted = name.input.value.trim();
    if (!wanted) return name.input.focus();
    button.disabled = true;
    say(note, "The server fetches it…");
    try {
      const which = /^\d+$/.test(wanted) ? { lora_task_id: wanted } : { lora_name: wanted };
      await api.post("load", { which, source: source.input.value.trim(), path: path.input.value.trim() });
      toast(`${wanted} is in memory`);
      close();
    } catch (error) {
      note.className = "error";
      say(note, error.message);
    }
    button.disabled = false;
    onDone();
  };
  openDialog("Load from a source", (close) => el("form", { class: "fields", on: { submit: (event) => submit(event, close) } },
    ...name.parts, ...source.parts, ...path.parts, note, el("div", { class: "actions" }, button)));
  name.input.focus();
}
