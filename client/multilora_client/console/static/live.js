// Figures of now: what happened between two looks at the server's counters.

import { el, say, svg } from "./dom.js";
import { count, percent, plural, seconds, title } from "./format.js";

const WINDOW_S = 20;
const HISTORY = 90;

const TILES = [
  ["output", "Output", "tokens/s"],
  ["requests", "Requests", "/s"],
  ["first", "First token", ""],
  ["between", "Between tokens", ""],
  ["running", "Running", ""],
  ["batch", "Batch", "requests a step"],
  ["kv", "KV cache", ""],
];

/** A quantile of the observations between two histograms, within its bucket by proportion; null without any. */
export function quantile(now, before, share) {
  const counts = now.counts.map((value, index) => value - (before?.counts[index] ?? 0));
  const total = counts.reduce((sum, value) => sum + value, 0);
  if (total <= 0) return null;
  let rest = share * total;
  for (const [index, value] of counts.entries()) {
    if (value && rest <= value) {
      const low = index ? now.bounds[index - 1] : 0;
      const high = now.bounds[index] ?? low;
      return low + ((high - low) * rest) / value;
    }
    rest -= value;
  }
  return now.bounds.at(-1);
}

const sum = (values) => Object.values(values).reduce((total, value) => total + value, 0);
const FINE = new Set(["stop", "length", "cancelled"]);

export class Live {
  /** onPick(taskId, tenant): hears of an adapter that shall be shown. */
  constructor(tiles, batch, busiest, onPick) {
    this._onPick = onPick;
    this._root = tiles;
    this._tiles = Object.fromEntries(TILES.map(([key, label, unit]) => [key, this._tile(label, unit)]));
    this._batch = batch;
    this._busiest = busiest;
    this._looks = [];
    this._history = Object.fromEntries(TILES.map(([key]) => [key, []]));
    this._drawn = "";
    this.names = new Map();
  }

  /** stats: the server's, null where this key may not see them. now: seconds. */
  update(stats, now) {
    this._root.hidden = stats === null;
    this._batch.parentElement.hidden = stats === null;
    if (stats === null) return;
    const look = { now, stats };
    const latest = this._looks.at(-1);
    if (latest && stats.load.requests.output_tokens < latest.stats.load.requests.output_tokens) this._looks = [];
    this._looks.push(look);
    while (this._looks.length > 2 && now - this._looks[0].now > WINDOW_S) this._looks.shift();
    this._show(look, this._looks.at(-2) ?? look, this._looks[0]);
  }

  _show({ now, stats }, last, first) {
    const { requests, engine } = stats.load;
    const [was, start] = [last.stats.load, first.stats.load];
    const passed = Math.max(0.2, now - last.now);
    const output = (requests.output_tokens - was.requests.output_tokens) / passed;
    const prompt = (requests.prompt_tokens - was.requests.prompt_tokens) / passed;
    const ended = sum(requests.requests) - sum(was.requests.requests);
    this._set("output", count(output), `${count(prompt)} prompt`, output);
    const failed = Object.entries(requests.requests).filter(([outcome]) => !FINE.has(outcome));
    const numFailed = sum(Object.fromEntries(failed)) - sum(Object.fromEntries(Object.entries(start.requests.requests).filter(([o]) => !FINE.has(o))));
    this._set("requests", count(ended / passed), numFailed ? `${count(numFailed)} failed recently` : `${count(sum(requests.requests))} in all`, ended / passed);
    this._times("first", requests.first_token_seconds, start.requests.first_token_seconds);
    this._times("between", requests.inter_token_seconds, start.requests.inter_token_seconds);
    const [waited, unit] = seconds(quantile(requests.queue_seconds, start.requests.queue_seconds, 0.5));
    this._set("running", String(engine.num_running), `${engine.num_waiting} waiting${unit && `, ${waited} ${unit}`}`, engine.num_running + engine.num_waiting);
    const steps = sum(requests.batch_size.counts) - sum(start.requests.batch_size.counts);
    const mean = steps > 0 ? (requests.batch_size.total - start.requests.batch_size.total) / steps : null;
    this._set("batch", mean === null ? "–" : count(mean), "", mean ?? 0, steps > 0 ? "requests a step" : "");
    const usage = 1 - engine.num_free_blocks / Math.max(1, engine.num_blocks);
    const { queried_tokens, hit_tokens } = engine.prefix_cache;
    const asked = queried_tokens - start.engine.prefix_cache.queried_tokens;
    const hits = asked > 0 ? (hit_tokens - start.engine.prefix_cache.hit_tokens) / asked : null;
    this._set("kv", percent(usage), hits === null ? "of its blocks held" : `${percent(hits)} of prompts cached`, usage);
    this._adaptersInUse(stats, first, now);
  }

  _times(key, now, before) {
    const [half, unit] = seconds(quantile(now, before, 0.5));
    const [most, mostUnit] = seconds(quantile(now, before, 0.99));
    this._set(key, half, mostUnit ? `p99 ${most} ${mostUnit}` : "no recent requests", quantile(now, before, 0.5) ?? 0, unit && `${unit} p50`);
  }

  _adaptersInUse(stats, first, now) {
    const { running, waiting } = stats.load.adapters;
    const key = JSON.stringify([running, waiting].map((labels) => labels.map((label) => [label, this._adapterOf(label)?.name])));
    if (key !== this._drawn) {
      this._drawn = key;
      const chips = [
        ...running.map((label) => this._chip(label, { class: "chip running" })),
        ...waiting.map((label) => this._chip(label, { class: "chip waiting", title: "waits" })),
      ];
      this._batch.replaceChildren(...(chips.length ? chips : [el("span", { class: "muted" }, "No adapter in use right now")]));
    }
    const passed = Math.max(1, now - first.now);
    const busy = Object.entries(stats.usage)
      .map(([label, usage]) => [label, (usage.output_tokens - (first.stats.usage[label]?.output_tokens ?? 0)) / passed, usage])
      .sort(([, a, one], [, b, other]) => b - a || other.requests - one.requests)
      .slice(0, 4);
    const most = Math.max(1e-9, ...busy.map(([, rate]) => rate));
    const total = (usage) => `${plural(usage.requests, "request")}, ${plural(usage.output_tokens, "token")}`;
    this._busiest.replaceChildren(...(busy.length ? busy.map(([label, rate, usage]) => {
      const bar = el("i", { class: "rate" });
      bar.style.width = `${(100 * rate) / most}%`;
      return el("div", { class: "busy", title: total(usage) },
        el("span", { class: "name" }, this._called(label)), el("span", { class: "number" }, rate ? `${count(rate)} tokens/s` : total(usage)), bar);
    }) : [el("span", { class: "muted" }, "No adapter has been asked yet")]));
  }

  /** A press shows the adapter, if the list has it. */
  _chip(label, props) {
    const adapter = this._adapterOf(label);
    if (!adapter) return el("span", props, this._called(label));
    return el("button", { type: "button", ...props, on: { click: () => this._onPick(adapter.lora_task_id, adapter.tenant) } }, this._called(label));
  }

  _adapterOf(label) {
    const number = label.split("@").at(-1);
    return this.names.get(number) ?? [...this.names.values()].find((adapter) => adapter.name === number);
  }

  /** A label is a name or a task id, after its tenant and @ if it has one. */
  _called(label) {
    const number = label.split("@").at(-1);
    const adapter = this.names.get(number);
    return adapter?.name ? label.replace(number, title(adapter)) : /^\d+$/.test(number) ? label.replace(number, `#${number}`) : label;
  }

  _tile(label, unit) {
    const parts = {
      value: el("span", { class: "value" }, "–"),
      unit: el("span", { class: "unit" }, unit),
      note: el("span", { class: "note muted" }),
      line: svg("polyline", { points: "" }),
    };
    const chart = svg("svg", { class: "spark", viewBox: `0 0 ${HISTORY - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, parts.line);
    this._root.append(el("div", { class: "tile" },
      el("span", { class: "label" }, label),
      el("span", { class: "figure" }, parts.value, " ", parts.unit), parts.note, chart));
    return parts;
  }

  _set(key, value, note, height, unit) {
    const tile = this._tiles[key];
    say(tile.value, value);
    say(tile.note, note);
    if (unit !== undefined) say(tile.unit, unit);
    const history = this._history[key];
    history.push(height);
    if (history.length > HISTORY) history.shift();
    const most = Math.max(...history, 1e-9);
    const offset = HISTORY - history.length;
    const points = history.map((h, index) => `${index + offset},${(19.5 - (18 * h) / most).toFixed(1)}`);
    tile.line.setAttribute("points", [`${offset - 1},21`, ...points, `${HISTORY},21`].join(" "));
  }
}
