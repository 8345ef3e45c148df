// The frame: which page the address names, the connection, the theme, the count of alerts.

import * as alerts from "./alerts.js";
import { get, isAbort } from "./api.js";
import * as compare from "./compare.js";
import { fill, h, icon, pageState } from "./dom.js";
import { Live } from "./live.js";
import { renewMoments } from "./parts.js";
import * as run from "./run.js";
import * as runs from "./runs.js";
import * as theme from "./theme.js";
import * as views from "./view.js";

const PAGES = { runs, run, compare, alerts };
const PLACES = [
  ["runs", "Runs"],
  ["compare", "Compare"],
  ["alerts", "Alerts"],
];
const MOMENTS_MS = 5_000;
const ALERTS_MS = 2_000;

const live = new Live();
const root = document.getElementById("content");
let leave = new AbortController();
let active = 0;
let shown = null;

function setTitle(text) {
  document.title = `${text} · capibara`;
}

/** Shows the page that the address names. */
function show() {
  leave.abort();
  leave = new AbortController();
  const view = views.current();
  const isOther = shown !== null && (shown.page !== view.page || shown.id !== view.id || shown.tab !== view.tab);
  const keepsTop = shown !== null && shown.page === "run" && view.page === "run" && shown.id === view.id;
  shown = view;
  drawPlaces(view);
  fill(root);
  if (view.page === "missing") {
    setTitle("Not found");
    fill(
      root,
      pageState(
        "folder",
        "There is no such page",
        "The address names none.",
        h("a", { class: "button", href: "#/runs" }, "All runs"),
      ),
    );
  } else PAGES[view.page].show(root, { view, live, signal: leave.signal, setTitle });
  if (isOther) {
    if (!keepsTop) scrollTo(0, 0);
    root.focus({ preventScroll: true });
  }
}

function drawPlaces({ page }) {
  fill(
    document.getElementById("places"),
    PLACES.map(([name, text]) =>
      h(
        "a",
        { href: views.to(name), "aria-current": name === page ? "page" : null },
        text,
        name === "alerts" &&
          active > 0 &&
          h("span", { class: "count" }, String(active), h("span", { class: "sr-only" }, " active")),
      ),
    ),
  );
}

function drawLink() {
  const words = { live: "Live", lost: "Connection lost", connecting: "Connecting", paused: "Paused" }[live.state];
  const box = document.getElementById("link-state");
  box.dataset.state = live.state;
  box.title = words;
  fill(
    box,
    h("span", { class: "dot", "aria-hidden": "true" }),
    h("span", { class: "words" }, words),
    h("span", { class: "sr-only" }, words),
  );
  const lost = document.getElementById("lost");
  lost.hidden = live.state !== "lost";
  const since = live.lostAt ? new Date(1000 * live.lostAt).toLocaleTimeString("en-GB") : "";
  lost.textContent =
    live.state === "lost"
      ? `The dashboard's server does not answer. What is shown is of ${since}; the page connects again by itself.`
      : "";
}

function drawTheme() {
  const button = document.getElementById("theme");
  const chosen = theme.choice();
  const label = `Theme: ${chosen === "system" ? "as the system" : chosen}; change`;
  button.setAttribute("aria-label", label);
  button.title = label;
  fill(button, icon({ system: "system", light: "sun", dark: "moon" }[chosen]));
}

let alertsTimer = 0;
function countAlerts() {
  alertsTimer ||= setTimeout(async () => {
    alertsTimer = 0;
    try {
      active = (await get("/api/alerts", { active: 1 })).alerts.length;
      drawPlaces(views.current());
    } catch (error) {
      if (!isAbort(error)) active = 0; // the connection's state says that it is lost
    }
  }, ALERTS_MS / 10);
}

theme.begin(views.current().params);
drawTheme();
drawLink();
document.getElementById("theme").addEventListener("click", () => {
  theme.next();
  if (views.current().params.has("theme")) views.change({ theme: theme.choice() });
  drawTheme();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment is the view's
  root.focus();
});
document.addEventListener("token-needed", () => {
  leave.abort();
  fill(
    root,
    pageState(
      "warn",
      "A token is needed",
      "Open the address that the dashboard printed when it started: it has the token.",
    ),
  );
});
addEventListener("hashchange", show);
live.addEventListener("state", drawLink);
for (const name of ["hello", "alert", "resync"]) live.addEventListener(name, countAlerts);
setInterval(() => renewMoments(live.now()), MOMENTS_MS);
live.connect();
show();
