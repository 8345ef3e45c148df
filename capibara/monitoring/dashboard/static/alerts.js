// Alerts, those that last first, and their rules.

import { get, isAbort } from "./api.js";
import { fill, h, skeleton, state } from "./dom.js";
import { number, visible, whole } from "./format.js";
import { bdi, moment, tableCard } from "./parts.js";
import * as views from "./view.js";

const KINDS = {
  spike: "Loss spike",
  nan: "Not finite",
  stall: "Stall",
  goodput: "Low goodput",
  disk: "Disk nearly full",
  rejected: "Nodes rejected",
};
const RULES = {
  spike_sigmas: (value) => `A loss spike is ${number(value)} standard deviations above the recent losses`,
  spike_window: (value) => `of the last ${whole(value)} lines.`,
  low_goodput: (value) => `Goodput is low below ${number(100 * value)}%`,
  goodput_after_s: (value) => `after the first ${whole(value / 60)} minutes.`,
  disk_free_gib: (value) => `The disk is nearly full below ${number(value)} GiB.`,
  quiet_s: (value) => `A run is stalled after ${whole(value)} s without a line from it,`,
  quiet_train_s: (value) => `or ${whole(value / 60)} minutes without training.`,
};

export function alertNotice(alert, now_s, link = null) {
  return h(
    "div",
    { class: `notice ${alert.severity === "serious" ? "bad" : ""}` },
    h("strong", {}, KINDS[alert.kind] ?? visible(alert.kind)),
    h("span", {}, visible(alert.text)),
    h("span", { class: "small" }, moment(alert.time, now_s)),
    link,
  );
}

export function show(root, { live, signal, setTitle }) {
  setTitle("Alerts");
  const body = h("div", { class: "card" }, skeleton(220));
  const rules = h("div", { class: "foot" });
  fill(
    root,
    h(
      "div",
      { class: "page-head" },
      h(
        "div",
        { class: "grow" },
        h("h1", {}, "Alerts"),
        h("p", {}, "Loss spikes, values that are not finite, stalls, low goodput, full disks."),
      ),
    ),
    body,
    rules,
  );
  const load = async () => {
    try {
      draw(body, rules, await get("/api/alerts", {}, signal), live.now());
    } catch (error) {
      if (!isAbort(error))
        fill(
          body,
          state(
            "warn",
            "The alerts could not be loaded",
            error.message,
            h("button", { type: "button", class: "button", onclick: load }, "Try again"),
          ),
        );
    }
  };
  for (const name of ["alert", "resync", "runs"]) live.addEventListener(name, load, { signal });
  load();
}

function draw(body, rules, { alerts, rules: values, webhooks }, now_s) {
  const rows = [...alerts]
    .sort((one, two) => Number(two.active) - Number(one.active) || two.time - one.time)
    .map((alert) =>
      h(
        "tr",
        {},
        h(
          "td",
          {},
          h(
            "span",
            { class: `pill ${alert.active ? (alert.severity === "serious" ? "bad" : "warn") : ""}` },
            alert.active ? "active" : "over",
          ),
        ),
        h("th", { scope: "row" }, KINDS[alert.kind] ?? visible(alert.kind)),
        h("td", {}, h("a", { href: views.to("run", { id: alert.run }) }, bdi(alert.run_name))),
        h("td", { class: "text" }, visible(alert.text)),
        h("td", { class: "right" }, whole(alert.step)),
        h("td", { class: "right" }, moment(alert.time, now_s)),
      ),
    );
  fill(
    body,
    rows.length
      ? tableCard("Alerts", [["State"], ["Alert"], ["Run"], ["What was found"], ["Step", true], ["When", true]], rows)
          .firstChild
      : state("check", "No alerts", "Nothing unusual was found in any run."),
  );
  const sentences = Object.entries(values ?? {})
    .filter(([name]) => name in RULES)
    .map(([name, value]) => RULES[name](value))
    .join(" ");
  fill(
    rules,
    h("p", {}, sentences),
    h(
      "p",
      {},
      webhooks
        ? `Sent to ${webhooks} ${webhooks === 1 ? "webhook" : "webhooks"}.`
        : "No webhook is set: capibara dashboard --webhook=URL sends alerts elsewhere.",
    ),
  );
}
