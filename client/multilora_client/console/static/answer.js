// One column of the playground: who is asked, what was said so far, and how.

import { el, hideTip, say, showTip } from "./dom.js";
import { count, seconds, title } from "./format.js";
import { identity } from "./adapters.js";
import { which } from "./details.js";

const BASE = "base model";

/** The text by which the picker calls an adapter: no two have the same. */
export function called(adapter) {
  const name = adapter.name || adapter.lora_task_id;
  return adapter.tenant ? `${adapter.tenant}@${name}` : name;
}

export class Column {
  /** adapters: a function that gives the latest list. onClose(column): it shall go. */
  constructor(number, adapters, onClose) {
    this._adapters = adapters;
    this.turns = [];
    this.adapter = null;
    const id = `who-${number}`;
    this._who = el("input", {
      id, class: "who", value: BASE, list: "adapter-names", spellcheck: false, autocomplete: "off",
      on: { change: () => this._choose(this._who.value), focus: () => this._offerAll(), click: () => this._openList(), blur: () => this._restore() },
    });
    this._log = el("div", { class: "log", tabIndex: 0, role: "log", "aria-label": "Answers", on: { keydown: (event) => this._walk(event) } });
    this._foot = el("dl", { class: "foot" });
    this.root = el("section", { class: "column", "aria-label": "Asked" },
      el("header", { class: "bar" },
        el("label", { class: "visually-hidden", for: id }, "Who is asked"), this._who, el("span", { class: "arrow", "aria-hidden": "true" }, "▾"),
        el("button", { type: "button", class: "plain icon", "aria-label": "Remove this column", on: { click: () => onClose(this) } }, "✕")),
      this._log, this._foot);
    for (const kind of ["mouseover", "mouseout"]) this._log.addEventListener(kind, (event) => this._hover(event));
    this._choose(BASE);
  }

  /** How the backend is told who is asked.

  Of a tenant's adapter with its version: where the page's key is not the tenant's, its name means another adapter. */
  get target() {
    const { adapter } = this;
    if (!adapter?.tenant) return { adapter: adapter && which(adapter) };
    const latest = this._adapters().find((other) => identity(other) === identity(adapter));
    return { adapter: which(adapter), expected_digest: (latest ?? adapter).digest };
  }

  pick(adapter) {
    this._who.value = adapter ? called(adapter) : BASE;
    this._choose(this._who.value, adapter);
  }

  clear() {
    this.turns = [];
    this._log.replaceChildren();
    this._foot.replaceChildren();
  }

  begin(question) {
    this.turns.push({ role: "user", content: question });
    this._text = "";
    this._tokens = [];
    this._ended = false;
    this._answer = el("div", { class: "answer pending" });
    this._log.append(el("div", { class: "question" }, question), this._answer);
    this._foot.replaceChildren();
    this._scroll();
  }

  take(piece) {
    if (piece.error) return this.fail(piece.error);
    if (piece.end) return this._end(piece.end);
    this._answer.classList.remove("pending");
    const follows = this._log.scrollHeight - this._log.scrollTop - this._log.clientHeight < 40;
    this._text += piece.text;
    if (piece.tokens.length) {
      for (const token of piece.tokens) this._answer.append(this._token(token));
    } else this._answer.append(piece.text);
    if (follows) this._scroll();
  }

  stop() {
    if (!this._answer?.isConnected || this._ended) return;
    this._answer.classList.remove("pending");
    this._keep();
    this._answer.append(el("span", { class: "muted" }, " stopped"));
  }

  /** The browser lists what begins like the text: without a text, everything. */
  _offerAll() {
    this._who.placeholder = this._who.value;
    this._who.value = "";
  }

  _openList() {
    try {
      this._who.showPicker();
    } catch { /* a browser without it lists on a key */ }
  }

  _restore() {
    if (!this._who.value.trim()) this._who.value = this._who.placeholder;
  }

  _choose(text, given) {
    const wanted = text.trim();
    if (!wanted) return;
    const isBase = wanted === BASE;
    const found = given ?? this._adapters().find((adapter) => called(adapter) === wanted || adapter.lora_task_id === wanted);
    // A name that nobody has yet may be one of a source; the server tells.
    const adapter = isBase ? null : found ?? (/^\d+$/.test(wanted) ? { lora_task_id: wanted, name: "" } : { lora_task_id: "", name: wanted });
    const isOther = (adapter && called(adapter)) !== (this.adapter && called(this.adapter));
    this.adapter = adapter;
    if (isBase) this._who.value = BASE;
    this.root.setAttribute("aria-label", adapter ? title(adapter) : BASE);
    this.root.classList.toggle("base", isBase);
    if (isOther) this.clear();
  }

  _token(token) {
    const span = el("span", { class: "token" }, token.text);
    const share = Math.exp(token.log_prob);
    span.dataset.likely = share > 0.9 ? "4" : share > 0.6 ? "3" : share > 0.3 ? "2" : share > 0.1 ? "1" : "0";
    span.token = token;
    this._tokens.push(span);
    return span;
  }

  _end(end) {
    this._ended = true;
    this._answer.classList.remove("pending");
    this._keep();
    // The end token, and a stop word, are tokens and no text.
    let rest = this._text.length;
    for (const span of this._tokens) {
      rest -= span.token.text.length;
      span.classList.toggle("beyond", rest < 0);
    }
    if (!this._text && !this._tokens.length) this._answer.append(el("span", { class: "muted" }, "an empty answer"));
    const [first, unit] = seconds(end.first_token_s);
    const pace = end.num_output_tokens > 1 && end.first_token_s !== null
      ? (end.num_output_tokens - 1) / Math.max(1e-6, end.seconds - end.first_token_s) : null;
    const isOther = this.adapter?.digest && end.lora_digest && this.adapter.digest !== end.lora_digest;
    const facts = [
      ["Answered by", end.lora_digest ? end.lora_digest.slice(0, 12) : BASE, isOther ? "another version than listed" : end.lora_digest || "no adapter"],
      ["Prompt", `${count(end.num_input_tokens)} tokens`, null],
      ["Cached", `${count(end.num_cached_tokens ?? 0)} of them`, "tokens of the prompt that were not computed again"],
      ["Answer", `${count(end.num_output_tokens)} tokens, ${end.finish_reason}`, null],
      ["First token", `${first} ${unit}`, null],
      ["Output rate", pace === null ? "–" : `${count(pace)} tokens/s`, null],
    ];
    this._foot.replaceChildren(...facts.map(([name, value, more]) =>
      el("div", { class: isOther && name === "Answered by" ? "error" : "" }, el("dt", {}, name), el("dd", { title: more ?? "" }, value))));
    this._scroll();
  }

  fail(error) {
    if (this._ended) return;
    this._ended = true;
    this._answer.classList.remove("pending");
    this._answer.append(el("p", { class: "error" }, error.message));
    this.turns.pop();
  }

  /** What was said is part of the chat. */
  _keep() {
    this._ended = true;
    this.turns.push({ role: "assistant", content: this._text });
  }

  _scroll() {
    this._log.scrollTop = this._log.scrollHeight;
  }

  _hover(event) {
    const span = event.target.closest?.(".token");
    if (event.type === "mouseover" && span) this._tell(span);
    else hideTip();
  }

  /** Arrows walk the tokens, for those without a mouse. */
  _walk(event) {
    const spans = [...this._log.querySelectorAll(".token")];
    const at = spans.findIndex((span) => span.classList.contains("current"));
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hideTip();
    if (!step || !spans.length) return;
    event.preventDefault();
    const next = spans[at < 0 ? 0 : Math.max(0, Math.min(spans.length - 1, at + step))];
    spans[at]?.classList.remove("current");
    next.classList.add("current");
    next.scrollIntoView({ block: "nearest" });
    this._tell(next);
  }

  _tell(span) {
    const { text, log_prob, top } = span.token;
    const box = span.getBoundingClientRect();
    const line = (name, value, isChosen) => {
      const bar = el("i", { class: "share" });
      bar.style.width = `${Math.max(1, 100 * Math.exp(value))}%`;
      return el("div", { class: isChosen ? "likely chosen" : "likely" },
        el("span", { class: "mono" }, JSON.stringify(name)), el("span", { class: "number" }, `${(100 * Math.exp(value)).toFixed(1)} %`),
        el("span", { class: "number muted" }, value.toFixed(3)), bar);
    };
    const isAmong = top.some((other) => other.log_prob === log_prob && (other.text === text || !text));
    const lines = top.map((other) => line(other.text, other.log_prob, other.log_prob === log_prob));
    showTip(isAmong ? lines : [line(text, log_prob, true), ...lines], box.left + box.width / 2, box.bottom + 4);
  }
}
