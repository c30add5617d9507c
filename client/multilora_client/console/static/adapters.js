// The table of adapters. Only the rows in sight are in the document, so that thousands cost no more than twenty.

import { el, say } from "./dom.js";
import { ago, bytes, kind, title } from "./format.js";

export const TIERS = { DEVICE: "device", HOST: "host", DISK: "disk", REMOTE: "source" };
const TIER_ORDER = Object.keys(TIERS);

const COLUMNS = [
  { key: "name", label: "Adapter", value: (a) => title(a).toLowerCase(), text: title },
  { key: "location", label: "Tier", value: (a) => TIER_ORDER.indexOf(a.location), text: (a) => TIERS[a.location] ?? a.location },
  { key: "bytes", label: "Size", value: (a) => a.bytes, text: (a) => (a.bytes ? bytes(a.bytes) : ""), isNumber: true },
  { key: "ranks", label: "Ranks", value: (a) => a.ranks.at(-1) ?? 0, text: (a) => a.ranks.join(" "), isNumber: true },
  { key: "kinds", label: "Kind", value: kind, text: kind },
  { key: "num_pins", label: "In use", value: (a) => a.num_pins, text: (a) => (a.num_pins ? String(a.num_pins) : ""), isNumber: true },
  { key: "num_hits", label: "Hits", value: (a) => a.num_hits, text: (a) => (a.num_hits ? a.num_hits.toLocaleString("en-US") : ""), isNumber: true },
  { key: "last_used_s", label: "Used", value: (a) => a.last_used_s, text: (a) => ago(a.last_used_s), isNumber: true },
  { key: "digest", label: "Digest", value: (a) => a.digest, text: (a) => a.digest.slice(0, 12) },
];
/** Columns whose largest values are asked for first. */
const FALLING = new Set(["bytes", "ranks", "num_pins", "num_hits", "last_used_s"]);

/** What no two adapters have in common. */
export const identity = (adapter) => `${adapter.tenant}@${adapter.lora_task_id}`;

const isSame = (a, b) => a?.lora_task_id === b?.lora_task_id && a?.tenant === b?.tenant;

export class AdapterTable {
  /** onPick: hears of an adapter that shall be shown. */
  constructor(root, count, onPick) {
    this._root = root;
    this._count = count;
    this._onPick = onPick;
    this._all = [];
    this._shown = [];
    this._words = [];
    this._tier = "";
    this._sort = { key: "last_used_s", sign: -1 };
    this._active = 0;
    this._picked = null;
    this._heads = COLUMNS.map((column) => this._head(column));
    this._space = el("div", { class: "space", role: "presentation" });
    const body = el("div", { class: "rows", role: "rowgroup" }, this._space);
    this._headRow = el("div", { class: "head", role: "rowgroup" }, el("div", { class: "row", role: "row", "aria-rowindex": 1 }, this._heads));
    this._empty = el("p", { class: "empty muted" }, "No adapter yet. Drop a PEFT folder here.");
    this._grid = el("div", {
      class: "grid", role: "grid", tabIndex: 0, "aria-label": "Adapters", "aria-colcount": COLUMNS.length,
      on: { keydown: (event) => this._press(event), focus: () => this.draw(), blur: () => this.draw() },
    }, this._headRow, body);
    root.append(this._grid, this._empty);
    this._grid.addEventListener("scroll", () => this.draw(), { passive: true });
    body.addEventListener("click", (event) => this._click(event));
    new ResizeObserver(() => this.draw()).observe(this._grid);
    this._rows = new Map();
    this._order();
  }

  update(adapters) {
    this._all = adapters;
    this._order();
  }

  filter(text) {
    this._words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this._active = 0;
    this._grid.scrollTop = 0;
    this._order();
  }

  addTierFilter(root) {
    for (const [tier, label] of [["", "all"], ...Object.entries(TIERS)]) {
      const press = () => {
        this._tier = tier;
        for (const other of root.children) other.setAttribute("aria-pressed", String(other === button));
        this._order();
      };
      const button = el("button", { type: "button", "aria-pressed": String(tier === ""), on: { click: press } }, label);
      root.append(button);
    }
  }

  /** Shows an adapter, here and to onPick. */
  select(adapter) {
    const index = this._shown.findIndex((other) => isSame(other, adapter));
    this._picked = adapter;
    this._onPick(adapter);
    if (index >= 0) this._go(index);
    else this.draw();
  }

  draw() {
    const height = this._rowHeight();
    const first = Math.max(0, Math.floor(this._grid.scrollTop / height) - 4);
    const last = Math.min(this._shown.length, Math.ceil((this._grid.scrollTop + this._heightOfRows()) / height) + 4);
    this._space.style.height = `${this._shown.length * height}px`;
    this._root.style.setProperty("--rows-height", `${this._shown.length * height + this._headRow.offsetHeight}px`);
    const inSight = this._shown.slice(first, last);
    this._keepRows(inSight);
    const isFocused = this._grid.contains(document.activeElement);
    let next = this._space.firstElementChild;
    for (const [place, adapter] of inSight.entries()) {
      const row = this._rows.get(identity(adapter));
      this._fill(row, adapter, first + place, height, isFocused);
      if (row.root === next) next = next.nextElementSibling;
      else this._space.insertBefore(row.root, next);
    }
    const isActiveDrawn = this._active >= first && this._active < last;
    if (isActiveDrawn) this._grid.setAttribute("aria-activedescendant", `adapter-${this._active}`);
    else this._grid.removeAttribute("aria-activedescendant");
  }

  /** An adapter has one row for as long as it is in sight: a press on it reaches no other that has come to its place. */
  _keepRows(adapters) {
    const wanted = new Set(adapters.map(identity));
    for (const [key, row] of this._rows) {
      if (wanted.has(key)) continue;
      row.root.remove();
      this._rows.delete(key);
    }
    for (const key of wanted) if (!this._rows.has(key)) this._rows.set(key, this._row());
  }

  _order() {
    const { value } = COLUMNS.find((column) => column.key === this._sort.key);
    const active = this._shown[this._active];
    const matches = (a) => {
      if (this._tier && a.location !== this._tier) return false;
      const text = `${a.name} ${a.lora_task_id} ${a.digest} ${a.tenant}`.toLowerCase();
      return this._words.every((word) => text.includes(word));
    };
    const keyed = this._all.filter(matches).map((adapter) => [value(adapter), adapter]);
    keyed.sort(([a], [b]) => (a < b ? -this._sort.sign : a > b ? this._sort.sign : 0));
    this._shown = keyed.map(([, adapter]) => adapter);
    this._active = Math.max(0, this._shown.findIndex((other) => isSame(other, active)));
    const isAll = this._shown.length === this._all.length;
    const total = this._all.length.toLocaleString("en-US");
    say(this._count, isAll ? total : `${this._shown.length.toLocaleString("en-US")} of ${total}`);
    this._grid.setAttribute("aria-rowcount", this._shown.length + 1);
    this._empty.hidden = this._shown.length > 0;
    say(this._empty, this._all.length ? "No adapter matches." : "No adapter yet. Drop a PEFT folder anywhere on this page.");
    for (const [index, head] of this._heads.entries()) {
      const isSorted = COLUMNS[index].key === this._sort.key;
      head.setAttribute("aria-sort", isSorted ? (this._sort.sign > 0 ? "ascending" : "descending") : "none");
    }
    this.draw();
  }

  _head(column) {
    const press = () => {
      const isSorted = this._sort.key === column.key;
      this._sort = { key: column.key, sign: isSorted ? -this._sort.sign : FALLING.has(column.key) ? -1 : 1 };
      this._order();
    };
    return el("div", { role: "columnheader", class: `cell ${column.key}${column.isNumber ? " number" : ""}` },
      el("button", { type: "button", class: "sort", tabIndex: -1, on: { click: press } }, column.label));
  }

  _row() {
    const cells = COLUMNS.map((column) => el("div", { role: "gridcell", class: `cell ${column.key}${column.isNumber ? " number" : ""}` }));
    const sign = el("span", { class: "sign" });
    const name = el("span", { class: "name" });
    const tenant = el("span", { class: "tenant muted" });
    const pinned = el("span", { class: "pin", title: "stays in host memory" });
    cells[0].append(name, tenant, pinned);
    const tier = el("span");
    cells[1].append(sign, tier);
    return { root: el("div", { class: "row", role: "row" }, cells), cells, name, tenant, pinned, tier };
  }

  _fill(row, adapter, index, height, isFocused) {
    const { root, cells } = row;
    root.id = `adapter-${index}`;
    root.style.transform = `translateY(${index * height}px)`;
    root.dataset.index = index;
    root.dataset.tier = TIERS[adapter.location] ?? "";
    root.setAttribute("aria-rowindex", index + 2);
    root.setAttribute("aria-selected", String(isSame(adapter, this._picked)));
    root.classList.toggle("active", isFocused && index === this._active);
    root.classList.toggle("used", adapter.num_pins > 0);
    say(row.name, title(adapter));
    say(row.tenant, adapter.tenant ? `@${adapter.tenant}` : "");
    say(row.pinned, adapter.is_pinned ? "pinned" : "");
    row.pinned.hidden = !adapter.is_pinned;
    say(row.tier, COLUMNS[1].text(adapter));
    for (let column = 2; column < COLUMNS.length; column += 1) say(cells[column], COLUMNS[column].text(adapter));
  }

  _rowHeight() {
    return matchMedia("(max-width: 640px)").matches ? 52 : 30;
  }

  _click(event) {
    const row = event.target.closest(".row");
    if (row) this.select(this._shown[Number(row.dataset.index)]);
  }

  _press(event) {
    const page = Math.max(1, Math.floor(this._heightOfRows() / this._rowHeight()) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.target !== this._grid) return;
    if (event.key in steps) {
      event.preventDefault();
      this._go(Math.max(0, Math.min(this._shown.length - 1, this._active + steps[event.key])));
    } else if ((event.key === "Enter" || event.key === " ") && this._shown.length) {
      event.preventDefault();
      this.select(this._shown[this._active]);
    }
  }

  _go(index) {
    this._active = index;
    const height = this._rowHeight();
    const [top, bottom] = [index * height, (index + 1) * height];
    const inSight = this._heightOfRows();
    if (top < this._grid.scrollTop) this._grid.scrollTop = top;
    else if (bottom > this._grid.scrollTop + inSight) this._grid.scrollTop = bottom - inSight;
    this.draw();
  }

  /** The pixels below the heads, which stay while rows scroll. */
  _heightOfRows() {
    return this._grid.clientHeight - this._headRow.offsetHeight;
  }
}
