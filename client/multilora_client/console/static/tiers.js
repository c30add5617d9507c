// The tiers as bars: a block an adapter, as wide as its bytes. Blocks grow, shrink and move as adapters come and go.

import { identity } from "./adapters.js";
import { el, hideTip, say, showTip } from "./dom.js";
import { bytes, percent, plural, title } from "./format.js";

const HEIGHT = 34;
const MOVE_MS = 700;
const FLASH_MS = 1600;
const TIERS = [
  { key: "device", label: "Device", note: "ready for steps", has: (a) => a.location === "DEVICE" },
  { key: "host", label: "Host", note: "in memory", has: (a) => a.location === "DEVICE" || a.location === "HOST" },
  { key: "disk", label: "Disk", note: "in files", has: (a) => a.location === "DISK" },
];

/** 0 to 1, the same for the same adapter everywhere. */
function shade(adapter) {
  const text = adapter.digest || adapter.lora_task_id;
  let hash = 7;
  for (let index = 0; index < text.length; index += 1) hash = (hash * 31 + text.charCodeAt(index)) >>> 0;
  return (hash % 997) / 997;
}

export class Tiers {
  constructor(root, onPick) {
    this._onPick = onPick;
    this._bars = TIERS.map((tier) => new Bar(root, tier, onPick));
    this._source = el("p", { class: "muted sources" });
    root.append(this._source);
    new ResizeObserver(() => this.resize()).observe(root);
  }

  update(adapters, stats) {
    const latest = [...adapters].sort((a, b) => b.last_used_s - a.last_used_s);
    for (const bar of this._bars) bar.update(latest, stats?.tiers[bar.tier.key] ?? null);
    const numRemote = adapters.filter((adapter) => adapter.location === "REMOTE").length;
    const notes = [
      numRemote && `${numRemote.toLocaleString("en-US")} more in the server's sources, fetched when a request names them`,
      this._bars.some((bar) => bar.isHatched) && "Hatched: files of adapters that are in memory",
    ];
    say(this._source, notes.filter(Boolean).join(". "));
  }

  resize() {
    for (const bar of this._bars) bar.resize();
  }

  recolour() {
    for (const bar of this._bars) bar.draw();
  }
}

class Bar {
  constructor(root, tier, onPick) {
    this.tier = tier;
    this._blocks = new Map();
    this._kept = 0;
    this._isFirst = true;
    this._frame = 0;
    this._canvas = el("canvas", { role: "img", "aria-label": `${tier.label} tier` });
    this._figure = el("span", { class: "number" });
    this._counts = el("span", { class: "muted number" });
    root.append(el("div", { class: "tier", data: { tier: tier.key } },
      el("div", { class: "tier-name" }, el("b", {}, tier.label), el("span", { class: "muted" }, tier.note)),
      this._canvas,
      el("div", { class: "tier-figures" }, this._figure, this._counts)));
    this._canvas.addEventListener("mousemove", (event) => this._point(event));
    this._canvas.addEventListener("mouseleave", hideTip);
    this._canvas.addEventListener("click", (event) => {
      const block = this._at(event);
      if (block) onPick(block.adapter);
    });
  }

  /** adapters: the latest used first. stats: of this tier, or null. */
  update(adapters, stats) {
    const here = adapters.filter(this.tier.has);
    const used = here.reduce((sum, adapter) => sum + adapter.bytes, 0);
    const total = Math.max(stats?.bytes_total ?? 0, used, 1);
    const now = performance.now();
    let x = 0;
    const present = new Set();
    for (const adapter of here) {
      const width = adapter.bytes / total;
      const key = identity(adapter);
      present.add(key);
      const block = this._blocks.get(key) ?? { fromX: x, fromWidth: 0, x, width: 0, bornAt: this._isFirst ? -Infinity : now, shade: shade(adapter) };
      this._move(block, x, width, now);
      block.adapter = adapter;
      block.goneAt = null;
      this._blocks.set(key, block);
      x += width;
    }
    for (const [key, block] of this._blocks) {
      if (present.has(key)) continue;
      if (block.goneAt === null) {
        block.goneAt = now;
        this._move(block, block.toX, 0, now);
      } else if (now - block.goneAt > FLASH_MS) this._blocks.delete(key);
    }
    this._end = x;
    // A disk holds copies of what is in memory, too.
    this._kept = this.tier.key === "disk" && stats ? Math.max(0, stats.bytes_used / total - x) : 0;
    this._isFirst = this._isFirst && !here.length && stats === null;
    this._tell(here.length, used, total, stats);
    this._start = now;
    this.animate();
  }

  get isHatched() {
    return this._kept > 0;
  }

  _move(block, x, width, now) {
    if (block.toX === x && block.toWidth === width) return;
    Object.assign(block, { fromX: block.x, fromWidth: block.width, toX: x, toWidth: width, movedAt: now });
  }

  _tell(number, used, total, stats) {
    if (!stats) {
      say(this._figure, number ? bytes(used) : "none of yours");
      say(this._counts, number ? plural(number, "adapter") : "");
    } else {
      say(this._figure, stats.bytes_total ? `${bytes(stats.bytes_used)} of ${bytes(stats.bytes_total)}` : this.tier.key === "disk" ? "off (lora_cache_dir)" : "none");
      const asked = stats.hits + stats.misses;
      const counts = [plural(stats.num_adapters, "adapter")];
      if (asked) counts.push(`${percent(stats.hits / asked)} hits`);
      if (stats.evictions) counts.push(`${stats.evictions.toLocaleString("en-US")} evicted`);
      say(this._counts, counts.join(" · "));
    }
    this._canvas.parentElement.classList.toggle("absent", Boolean(stats) && !stats.bytes_total);
    this._canvas.setAttribute("aria-label", `${this.tier.label} tier: ${this._figure.textContent}, ${this._counts.textContent}`);
  }

  resize() {
    const width = this._canvas.clientWidth;
    const scale = devicePixelRatio || 1;
    if (!width) return;
    this._canvas.width = Math.round(width * scale);
    this._canvas.height = Math.round(HEIGHT * scale);
    this.draw();
  }

  animate() {
    cancelAnimationFrame(this._frame);
    const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const frame = () => {
      this.draw(isCalm);
      if (performance.now() - this._start < FLASH_MS && !isCalm) this._frame = requestAnimationFrame(frame);
    };
    frame();
  }

  draw(isCalm = false) {
    const context = this._canvas.getContext("2d");
    const { width, height } = this._canvas;
    const now = performance.now();
    const style = getComputedStyle(this._canvas);
    const [colour, ink, alarm] = [style.color, style.borderTopColor, style.outlineColor];
    const gap = Math.max(1, devicePixelRatio || 1);
    context.clearRect(0, 0, width, height);
    if (this._kept) this._hatch(context, this._end * width, this._kept * width, height, colour);
    for (const block of this._blocks.values()) {
      const passed = isCalm ? 1 : Math.min(1, (now - block.movedAt) / MOVE_MS);
      const eased = 1 - (1 - passed) ** 3;
      block.x = block.fromX + (block.toX - block.fromX) * eased;
      block.width = block.fromWidth + (block.toWidth - block.fromWidth) * eased;
      const [x, full] = [block.x * width, block.width * width];
      if (full < 0.05) continue;
      const wide = full > 4 * gap ? full - gap : Math.max(full, 0.4);
      const isGone = block.goneAt !== null;
      const isUsed = block.adapter.num_pins > 0;
      context.globalAlpha = isUsed ? 1 : 0.38 + 0.34 * block.shade;
      context.fillStyle = isGone ? alarm : colour;
      context.fillRect(x, 0, wide, height);
      const age = now - block.bornAt;
      if (age < FLASH_MS && !isGone && !isCalm) {
        context.globalAlpha = 0.55 * (1 - age / FLASH_MS);
        context.fillStyle = ink;
        context.fillRect(x, 0, wide, height);
      }
      if (block.adapter.is_pinned && !isGone) {
        context.globalAlpha = 1;
        context.fillStyle = ink;
        context.fillRect(x, height - 3 * gap, wide, 3 * gap);
      }
    }
    context.globalAlpha = 1;
  }

  _hatch(context, x, width, height, colour) {
    context.save();
    context.beginPath();
    context.rect(x, 0, width, height);
    context.clip();
    context.globalAlpha = 0.28;
    context.strokeStyle = colour;
    context.lineWidth = devicePixelRatio || 1;
    const step = 6 * (devicePixelRatio || 1);
    for (let at = x - height; at < x + width; at += step) {
      context.beginPath();
      context.moveTo(at, height);
      context.lineTo(at + height, 0);
      context.stroke();
    }
    context.restore();
  }

  _at(event) {
    const share = event.offsetX / this._canvas.clientWidth;
    for (const block of this._blocks.values()) {
      if (block.goneAt === null && share >= block.x && share < block.x + block.width) return block;
    }
    return null;
  }

  _point(event) {
    const block = this._at(event);
    this._canvas.classList.toggle("pointed", Boolean(block));
    const box = this._canvas.getBoundingClientRect();
    const share = event.offsetX / this._canvas.clientWidth;
    if (block) {
      const { adapter } = block;
      showTip([title(adapter), `${bytes(adapter.bytes)}, rank ${adapter.ranks.join(", ")}`], event.clientX, box.bottom + 6);
    } else if (this._kept && share >= this._end && share < this._end + this._kept) {
      showTip(["Files of adapters that are in memory"], event.clientX, box.bottom + 6);
    } else hideTip();
  }
}
