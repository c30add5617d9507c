// Numbers as people read them.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** 5505024 -> "5.5 MB". */
export function bytes(number) {
  let unit = 0;
  while (number >= 999.5 && unit < UNITS.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return `${unit && number < 99.5 ? number.toFixed(1) : Math.round(number)} ${UNITS[unit]}`;
}

/** 1234.5 -> "1,235", 0.123 -> "0.12". */
export function count(number) {
  if (number >= 100 || Number.isInteger(number)) return Math.round(number).toLocaleString("en-US");
  return number >= 10 ? number.toFixed(1) : number.toFixed(2);
}

/** 0.0342 -> ["34", "ms"]. */
export function seconds(number) {
  if (number === null) return ["–", ""];
  if (number < 0.00995) return [(number * 1000).toFixed(1), "ms"];
  if (number < 0.9995) return [(number * 1000).toFixed(0), "ms"];
  return [number < 99.5 ? number.toFixed(number < 9.95 ? 2 : 1) : number.toFixed(0), "s"];
}

export const percent = (share) => (share === null ? "–" : `${(share * 100).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %`);

/** Seconds since the epoch -> "12 s ago". */
export function ago(then) {
  if (!then) return "";
  const passed = Math.max(0, Date.now() / 1000 - then);
  if (passed < 60) return `${Math.floor(passed)} s ago`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.floor(passed / 3600)} h ago`;
  return `${Math.floor(passed / 86400)} d ago`;
}

export const clock = (milliseconds) => new Date(milliseconds).toLocaleTimeString("en-GB");

/** 1, "adapter" -> "1 adapter". */
export const plural = (number, noun) => `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;

/** "LoRA", "DoRA, tokens"; nothing is known of one that only its source has. */
export const kind = (adapter) => adapter.kinds.join(", ");

/** A name for people: its own, or its task id. */
export const title = (adapter) => adapter.name || `#${adapter.lora_task_id}`;
