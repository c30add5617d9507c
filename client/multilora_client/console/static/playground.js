// Asks the base model and adapters the same, side by side.

import * as api from "./api.js";
import { Column, called } from "./answer.js";
import { openCode } from "./code.js";
import { el, say, toast } from "./dom.js";

const MAX_COLUMNS = 5;
const OPTIONS = [
  ["max_tokens", "Max tokens", 128, 1, 1],
  ["temperature", "Temperature", "", 0, 0.1],
  ["top_k", "Top k", "", 0, 1],
  ["top_p", "Top p", "", 0, 0.05],
  ["min_p", "Min p", "", 0, 0.05],
  ["repetition_penalty", "Repetition penalty", "", 0, 0.05],
  ["presence_penalty", "Presence penalty", "", -2, 0.1],
  ["frequency_penalty", "Frequency penalty", "", -2, 0.1],
  ["seed", "Seed", "", 0, 1],
];

export class Playground {
  constructor(root) {
    this.about = null;
    this._all = [];
    this._number = 0;
    this._columns = [];
    this._running = null;
    this._names = el("datalist", { id: "adapter-names" });
    this._board = el("div", { class: "columns" });
    this._add = el("button", { type: "button", class: "plain add", on: { click: () => this._addLatest() } }, "+ Add a column");
    root.append(this._names, el("div", { class: "playground" }, this._settings(), el("div", { class: "stage" }, this._board, this._composer())));
    this._open(null);
  }

  /** The latest list of adapters. */
  set adapters(adapters) {
    this._all = adapters;
    const names = adapters.map(called);
    const key = names.join("\n");
    if (key === this._key) return;
    this._key = key;
    this._names.replaceChildren(...["base model", ...names].map((value) => el("option", { value })));
  }

  /** A column for an adapter, unless it has one. */
  add(adapter) {
    if (this._has(adapter)) return null;
    if (this._columns.length >= MAX_COLUMNS) return toast(`At most ${MAX_COLUMNS} are asked at once`, "error");
    return this._open(adapter);
  }

  _has(adapter) {
    return this._columns.some((column) => column.adapter && called(column.adapter) === called(adapter));
  }

  /** A column for the adapter that was used last and has none; another one can be chosen in it. */
  _addLatest() {
    const others = this._all.filter((adapter) => !this._has(adapter)).sort((a, b) => b.last_used_s - a.last_used_s);
    const column = this._open(others[0] ?? null);
    column.root.querySelector(".who").focus();
  }

  _open(adapter) {
    this._number += 1;
    const column = new Column(this._number, () => this._all, (closed) => this._close(closed));
    if (adapter) column.pick(adapter);
    this._columns.push(column);
    this._board.append(column.root);
    this._count();
    return column;
  }

  _close(column) {
    if (this._columns.length === 1) return;
    this._columns = this._columns.filter((other) => other !== column);
    column.root.remove();
    this._count();
  }

  _count() {
    this._add.hidden = this._columns.length >= MAX_COLUMNS;
    this._board.dataset.number = this._columns.length;
  }

  _settings() {
    const choice = (value, label, isChosen) => {
      const id = `mode-${value}`;
      return [el("input", { type: "radio", name: "mode", id, value, checked: isChosen, on: { change: () => this._setMode(value) } }), el("label", { for: id }, label)];
    };
    this._system = el("textarea", { id: "system", rows: 3, placeholder: "none" });
    this._systemField = el("div", { class: "field" }, el("label", { for: "system" }, "System message"), this._system);
    this._inputs = new Map(OPTIONS.map(([key, , value, min, step]) => [key, el("input", { type: "number", id: `option-${key}`, value, min, step, placeholder: "off" })]));
    this._stop = el("input", { id: "option-stop", placeholder: "none", autocomplete: "off" });
    const legend = el("p", { class: "hint muted", hidden: true }, "Probability of a token: ",
      [["2", "30 to 60 %"], ["1", "10 to 30 %"], ["0", "below 10 %"]].map(([likely, text]) => [el("span", { class: "token", data: { likely } }, text.replaceAll(" ", "\u00a0")), " "]));
    this._logProbs = el("input", { type: "checkbox", id: "log-probs", on: { change: () => { legend.hidden = !this._logProbs.checked; } } });
    this._mode = "chat";
    return el("form", { class: "panel settings", on: { submit: (event) => event.preventDefault() } },
      el("div", { class: "segmented", role: "radiogroup", "aria-label": "Mode" }, choice("chat", "Chat", true), choice("text", "Text", false)),
      this._systemField,
      el("details", { class: "fold", open: !matchMedia("(max-width: 1100px)").matches }, el("summary", {}, "Options"),
      el("div", { class: "options" }, OPTIONS.map(([key, label]) => [el("label", { for: `option-${key}` }, label), this._inputs.get(key)]),
        el("label", { for: "option-stop" }, "Stop words"), this._stop),
      el("p", { class: "muted hint" }, "Greedy unless a sampling option is given. Several stop words: commas between."),
      el("div", { class: "check" }, this._logProbs, el("label", { for: "log-probs" }, "Log-probs of tokens")), legend));
  }

  _composer() {
    this._question = el("textarea", {
      id: "question", rows: 2, placeholder: "Ask something", "aria-label": "Question",
      on: { keydown: (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this._ask(); } } },
    });
    this._send = el("button", { type: "button", class: "primary", on: { click: () => (this._running ? this._running.abort() : this._ask()) } }, "Ask");
    return el("div", { class: "composer panel" }, this._question,
      el("div", { class: "actions" }, this._add,
        el("span", { class: "grow" }),
        el("button", { type: "button", on: { click: () => this._clear() } }, "Clear"),
        el("button", { type: "button", on: { click: () => this._showCode() } }, "Code"), this._send));
  }

  _setMode(mode) {
    this._mode = mode;
    this._systemField.hidden = mode !== "chat";
    this._clear();
  }

  _clear() {
    this._running?.abort();
    for (const column of this._columns) column.clear();
  }

  _options() {
    const options = {};
    for (const [key, input] of this._inputs) if (input.value !== "") options[key] = Number(input.value);
    const words = this._stop.value.split(",").map((word) => word.trim()).filter(Boolean);
    if (words.length) options.stop_words = words;
    return options;
  }

  _system_turns() {
    const system = this._system.value.trim();
    return system ? [{ role: "system", content: system }] : [];
  }

  _prompt(column, question) {
    return this._mode === "chat" ? { messages: [...this._system_turns(), ...column.turns] } : { prompt: question };
  }

  async _ask() {
    const question = this._mode === "chat" ? this._question.value.trim() : this._question.value;
    if (!question || this._running) return;
    const asked = [...this._columns];
    for (const column of asked) {
      if (this._mode === "text") column.clear();
      column.begin(question);
    }
    if (this._mode === "chat") this._question.value = "";
    this._running = new AbortController();
    say(this._send, "Stop");
    const body = {
      targets: asked.map((column) => ({ ...column.target, ...this._prompt(column, question) })),
      options: this._options(),
      wants_log_probs: this._logProbs.checked,
    };
    try {
      for await (const { column, ...piece } of api.postLines("ask", body, this._running.signal)) asked[column].take(piece);
      for (const column of asked) column.stop();
    } catch (error) {
      const isStopped = error.name === "AbortError";
      for (const column of asked) isStopped ? column.stop() : column.fail(error);
    }
    this._running = null;
    say(this._send, "Ask");
  }

  _showCode() {
    const question = this._question.value.trim();
    openCode({
      columns: this._columns, urls: this.about?.urls ?? {}, hasKey: api.hasKey(), options: this._options(),
      prompt: (column) => {
        if (this._mode === "text") return { prompt: question || "The capital of France is" };
        const turns = question || !column.turns.length ? [...column.turns, { role: "user", content: question || "Who are you?" }] : column.turns;
        return { messages: [...this._system_turns(), ...(turns.at(-1).role === "assistant" ? turns.slice(0, -1) : turns)] };
      },
    });
  }
}
