// Puts the parts together, and keeps them up to date.

import * as api from "./api.js";
import { AdapterTable } from "./adapters.js";
import { AliasList } from "./aliases.js";
import { Details } from "./details.js";
import { byId, el, openDialog, say, toast } from "./dom.js";
import { EventList } from "./events.js";
import { clock } from "./format.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";
import { Tiers } from "./tiers.js";
import { openLoadDialog, Uploads } from "./upload.js";

const POLL_MS = 1000;
const LIST_MS = 2000;
const MAX_LIST_MS = 15000;

const state = { about: null, adapters: [], stats: null, lastEvent: 0, isStale: true, listedAt: 0, answeredAt: 0, numEnded: -1 };

const details = new Details(byId("details"), {
  ask: askAdapter,
  changed: refreshSoon,
});
const table = new AdapterTable(byId("table"), byId("count"), (adapter) => details.show(adapter));
const tiers = new Tiers(byId("tiers"), (adapter) => table.select(adapter));
const live = new Live(byId("live"), byId("batch"), byId("busiest"), showAdapter);
const aliasList = new AliasList(byId("aliases"));
const events = new EventList(byId("events"), showAdapter);
const playground = new Playground(byId("view-playground"));
const uploads = new Uploads(refreshSoon, askAdapter);

function askAdapter(adapter) {
  playground.add(adapter);
  location.hash = "playground";
}

/** The adapter that an event or a request names, if there still is one. */
function showAdapter(taskId, tenant) {
  const adapter = state.adapters.find((other) => other.lora_task_id === taskId && other.tenant === tenant);
  if (adapter) table.select(adapter);
  else toast(`${taskId} is not in the list any more`, "error");
}

function refreshSoon() {
  state.isStale = true;
  state.listedAt = 0;
}

// --- polling -------------------------------------------------------------------------------------------------------

async function poll() {
  const key = api.keyNumber();
  try {
    if (!state.about) begin(await api.get("about"));
    takeLive(await api.get(`live?since=${state.lastEvent}`));
    await listIfNeeded();
    connected(true, "live");
    setState("live");
    state.answeredAt = Date.now();
  } catch (error) {
    if (key === api.keyNumber()) failed(error);
  }
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

function begin(about) {
  state.about = about;
  say(byId("model"), about.model.model);
  const layers = about.model.model_implementation === "native" ? "" : `, layers of ${about.model.model_implementation}`;
  byId("model").title = `${about.model.max_model_len.toLocaleString("en-US")} tokens of context, engine ${about.model.version}${layers}`;
  byId("read-only").hidden = !about.is_read_only;
  for (const button of document.querySelectorAll("[data-writes]")) {
    button.hidden = about.is_read_only;
  }
  details.isReadOnly = about.is_read_only;
  uploads.maxBytes = about.max_upload_bytes;
  playground.about = about;
}

function takeLive(report) {
  // An engine that was started again numbers its events anew.
  if (report.last < state.lastEvent) events.restart();
  const isAnew = report.last < state.lastEvent;
  state.lastEvent = isAnew ? 0 : report.last;
  if (!isAnew) events.add(report.events, report.num_missed);
  state.stats = report.stats;
  live.update(report.stats, performance.now() / 1000);
  const numEnded = report.stats ? Object.values(report.stats.load.requests.requests).reduce((a, b) => a + b, 0) : 0;
  const isBusy = report.stats && report.stats.load.engine.num_running + report.stats.load.engine.num_waiting > 0;
  if (report.events.length || isAnew || isBusy || numEnded !== state.numEnded) state.isStale = true;
  state.numEnded = numEnded;
}

/** `waiting` for the first answer, `live`, or `offline` with the figures of before: then a press would do nothing. */
function setState(name) {
  uploads.isAllowed = name === "live" && !state.about.is_read_only;
  if (document.body.dataset.state === name) return;
  document.body.dataset.state = name;
  for (const button of document.querySelectorAll("[data-writes]")) button.disabled = name !== "live";
  if (name === "live") showView(); // what was hidden had no size
}

/** The list is long: it is fetched when something happened, and now and then. */
async function listIfNeeded() {
  const age = performance.now() - state.listedAt;
  const isDue = state.listedAt === 0 || (state.isStale && age > Math.max(LIST_MS, state.adapters.length * 2)) || age > MAX_LIST_MS;
  if (!isDue) return tiers.update(state.adapters, state.stats);
  const { columns, rows, aliases = [] } = await api.get("adapters");
  state.adapters = rows.map((row) => Object.fromEntries(columns.map((column, index) => [column, row[index]])));
  state.isStale = false;
  state.listedAt = performance.now();
  const byTaskId = new Map(state.adapters.map((adapter) => [adapter.lora_task_id, adapter]));
  table.update(state.adapters);
  aliasList.update(aliases);
  details.update(state.adapters);
  events.names = live.names = byTaskId;
  playground.adapters = state.adapters;
  tiers.update(state.adapters, state.stats);
}

function connected(isUp, text) {
  const connection = byId("connection");
  connection.classList.toggle("up", isUp);
  say(connection.lastElementChild, text);
  if (isUp) byId("banner").hidden = true;
}

const UNREACHABLE = /^no server answers at (\S+?):?(\s|$)/i;

function failed(error) {
  connected(false, "offline");
  setState(state.about ? "offline" : "waiting");
  if (error.code === "unauthenticated" || error.code === "invalid_api_key") {
    connected(false, "needs a key");
    byId("key-button").hidden = false;
    if (!keyDialog?.open) askForKey(api.hasKey() ? "The server does not know this key." : "");
    return;
  }
  const banner = byId("banner");
  const unreachable = UNREACHABLE.exec(error.message);
  const before = state.about ? ` The figures are those of ${clock(state.answeredAt)}.` : "";
  say(banner, `${unreachable ? `No server answers at ${unreachable[1]}` : error.message}. Trying again.${before}`);
  banner.hidden = false;
  if (!(error instanceof api.ApiError)) console.error(error);
  refreshSoon();
}

// --- the API key ---------------------------------------------------------------------------------------------------

let keyDialog = null;

function askForKey(problem) {
  const input = el("input", { type: "password", autocomplete: "off", id: "key-input", spellcheck: false });
  keyDialog = openDialog("API key", (close) =>
    el("form", {
      on: {
        submit: (event) => {
          event.preventDefault();
          api.setKey(input.value.trim());
          state.about = null;
          refreshSoon();
          close();
        },
      },
    },
      el("p", { class: problem ? "error" : "muted", role: problem ? "alert" : undefined }, problem || "This server asks for an API key. The page keeps yours until it is reloaded, and stores it nowhere."),
      el("label", { for: "key-input" }, "Key"), input,
      el("div", { class: "actions" }, el("button", { class: "primary", type: "submit" }, "Use this key"))));
  input.focus();
}

byId("key-button").addEventListener("click", () => askForKey(""));

// --- views, theme, keys of the keyboard ------------------------------------------------------------------------------

const VIEWS = ["adapters", "playground"];

function showView() {
  const name = VIEWS.find((view) => location.hash === `#${view}`) ?? "adapters";
  for (const view of VIEWS) {
    byId(`view-${view}`).hidden = view !== name;
    if (view === name) byId(`tab-${view}`).setAttribute("aria-current", "page");
    else byId(`tab-${view}`).removeAttribute("aria-current");
  }
  document.title = `${name[0].toUpperCase()}${name.slice(1)} · multilora console`;
  if (name === "adapters") {
    table.draw();
    tiers.resize();
  }
}

addEventListener("hashchange", showView);

const THEMES = { auto: ["◐", "as the system"], light: ["○", "light"], dark: ["●", "dark"] };

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const [sign, name] = THEMES[theme];
  say(byId("theme-button"), sign);
  byId("theme-button").setAttribute("aria-label", `Theme: ${name}`);
  byId("theme-button").title = `Theme: ${name}`;
  tiers.recolour();
}

const storage = { // a browser may refuse it
  get: (name) => { try { return localStorage.getItem(name); } catch { return null; } },
  set: (name, value) => { try { localStorage.setItem(name, value); } catch { /* not kept */ } },
};

byId("theme-button").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const theme = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
  storage.set("theme", theme);
  setTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => tiers.recolour());

const SHORTCUTS = [
  ["/", "filter the adapters", () => { location.hash = "adapters"; byId("filter").focus(); }],
  ["a", "see the adapters", () => { location.hash = "adapters"; }],
  ["p", "see the playground", () => { location.hash = "playground"; }],
  ["u", "upload an adapter", () => uploads.open()],
  ["l", "load one from a source", () => uploads.isAllowed && openLoadDialog(refreshSoon)],
  ["t", "change the theme", () => byId("theme-button").click()],
  ["?", "show these", () => byId("help-button").click()],
];

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, textarea, select, [contenteditable]")) return;
  const shortcut = SHORTCUTS.find(([pressed]) => pressed === event.key);
  if (!shortcut) return;
  event.preventDefault();
  shortcut[2]();
});

byId("help-button").addEventListener("click", () => openDialog("Keyboard", () =>
  el("div", {},
    el("dl", { class: "keys" }, SHORTCUTS.map(([key, text]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, text)])),
    el("p", { class: "muted" }, "In the table: arrows, Page Up and Down, Home, End; Enter shows an adapter. In an answer with log-probs: arrows walk its tokens."))));

byId("filter").addEventListener("input", (event) => table.filter(event.target.value));
byId("upload-button").addEventListener("click", () => uploads.open());
byId("load-button").addEventListener("click", () => openLoadDialog(refreshSoon));
table.addTierFilter(byId("tier-filter"));

setTheme(Object.hasOwn(THEMES, storage.get("theme") ?? "") ? storage.get("theme") : "auto");
showView();
poll();

addEventListener("unhandledrejection", (event) => toast(String(event.reason?.message ?? event.reason), "error"));
