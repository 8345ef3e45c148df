// What the run folder says: checkpoints, lineage, plan, events, configuration.

import { download, fill, h, searchBox, state } from "./dom.js";
import { bytes, date, has, number, short, visible, whole, withUnit, NONE } from "./format.js";
import { cell, moment, tableCard } from "./parts.js";
import { loaded } from "./tab.js";
import * as views from "./view.js";

const CHECKPOINTS = {
  whole: ["good", "whole"],
  unverified: ["", "unverified"],
  corrupted: ["bad", "corrupted"],
  quarantined: ["bad", "quarantined"],
  rolled_back: ["warn", "rolled back"],
  lost: ["bad", "lost"],
  unfinished: ["warn", "unfinished"],
};
const LINEAGE = { unchanged: "good", changed: "bad", missing: "warn", "not checked": "" };

export function checkpoints(root, page) {
  loaded(
    root,
    page,
    "checkpoints",
    ({ steps }) => {
      if (!steps.length)
        return fill(
          root,
          h(
            "div",
            { class: "card" },
            state("folder", "No checkpoints yet", "The run saves one every Checkpointer.save_every steps."),
          ),
        );
      const rows = [...steps]
        .sort((one, two) => Number.parseInt(two.step, 10) - Number.parseInt(one.step, 10))
        .map((one) => {
          const [tone, words] = CHECKPOINTS[one.state] ?? ["", visible(one.state)];
          const about = [one.about, ...(one.faults ?? [])].filter(Boolean).map(visible).join("; ");
          return h(
            "tr",
            {},
            h("th", { scope: "row", class: "num" }, typeof one.step === "number" ? whole(one.step) : visible(one.step)),
            h("td", {}, h("span", { class: `pill ${tone}` }, words)),
            h("td", { class: "text muted small" }, about),
            cell(bytes(one.bytes), { class: "right" }),
            cell(whole(one.files), { class: "right" }),
            cell(number(one.score), { class: "right" }),
            h(
              "td",
              {},
              one.commit
                ? h("span", { class: "mono" }, visible(one.commit).slice(0, 8))
                : h("span", { class: "unavailable" }, NONE),
            ),
            h("td", { class: "right" }, saved(one.date)),
          );
        });
      return fill(
        root,
        tableCard(
          "Checkpoints",
          [
            ["Step"],
            ["Verification"],
            ["What that means"],
            ["Size", true],
            ["Files", true],
            ["Score", true],
            ["Commit"],
            ["Saved", true],
          ],
          rows,
        ),
      );
    },
    ["event"],
  );
}

/** A moment in seconds, or as ISO 8601 writes it. */
function saved(when) {
  return date(typeof when === "number" ? when : Date.parse(when) / 1000);
}

export function lineage(root, page) {
  loaded(root, page, "lineage", ({ chain }) =>
    fill(
      root,
      h(
        "div",
        { class: "card pad lineage" },
        h("p", { class: "muted small" }, "From the run back to its sources. Files are compared by their sizes."),
        h("ul", { class: "root" }, node(chain)),
      ),
    ),
  );
}

const MOST_PARENTS = 12;

function node(one) {
  const facts = Object.entries(one.facts ?? {}).map(
    ([name, value]) =>
      `${name} ${typeof value === "number" ? (name === "bytes" ? bytes(value) : whole(value)) : value}`,
  );
  const parents = one.parents ?? [];
  const rest = parents.length - MOST_PARENTS;
  return h(
    "li",
    {},
    h(
      "div",
      { class: "node" },
      h(
        "div",
        { class: "top" },
        h("span", { class: "kind" }, visible(one.kind)),
        h("span", { class: `pill ${LINEAGE[one.state] ?? ""}` }, visible(one.state)),
        one.digest && h("span", { class: "mono muted" }, visible(one.digest).slice(0, 12)),
      ),
      h("div", { class: "path mono" }, visible(one.path)),
      facts.length > 0 && h("div", { class: "more" }, facts.map(visible).join(" · ")),
      (one.notes ?? []).map((note) => h("div", { class: "notice small" }, visible(note))),
    ),
    parents.length > 0 &&
      h(
        "ul",
        {},
        parents.slice(0, MOST_PARENTS).map(node),
        rest > 0 && h("li", { class: "muted" }, `and ${whole(rest)} more`),
      ),
  );
}

export function plan(root, page) {
  const draw = ({ rows, plan: chosen, unavailable }) => {
    const value = (amount, unit) => cell(withUnit(amount, unit), { class: "right" });
    const body = (rows ?? []).map((row) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, visible(row.name)),
        value(row.predicted, row.unit),
        value(row.measured, row.unit),
        h("td", {}, ratio(row.ratio)),
        h("td", { class: "text muted" }, row.note ? visible(row.note) : ""),
      ),
    );
    fill(
      root,
      h(
        "div",
        { class: "stacked" },
        unavailable &&
          h("div", { class: "notice" }, h("strong", {}, "No prediction"), h("span", {}, visible(unavailable))),
        chosen &&
          h(
            "div",
            { class: "card pad" },
            h(
              "div",
              { class: "facts" },
              Object.entries(chosen).map(([name, text]) =>
                h(
                  "span",
                  {},
                  h("span", { class: "muted" }, visible(name)),
                  h("span", { class: "mono" }, visible(typeof text === "object" ? JSON.stringify(text) : text)),
                ),
              ),
            ),
          ),
        body.length > 0 &&
          tableCard(
            "Plan beside what is measured",
            [["Quantity"], ["Planned", true], ["Measured", true], ["Measured / planned"], [""]].map(
              ([text, isNumber]) => [text || "Note", isNumber],
            ),
            body,
          ),
      ),
    );
  };
  draw.takesUnavailable = true;
  loaded(root, page, "plan", draw);
}

/** Measured over planned: the mark in the middle of the beam is 1. */
function ratio(value) {
  if (!has(value)) return h("span", { class: "unavailable" }, NONE);
  return h(
    "span",
    { class: "ratio" },
    h(
      "span",
      { class: "beam", "aria-hidden": "true" },
      h("span", { vars: { width: `${Math.max(2, Math.min(100, 50 * value))}%` } }),
    ),
    h("span", { class: "num" }, `${number(value, 3)}×`),
  );
}

export function events(root, page) {
  const skipped = new Set(["step", "time", "event"]);
  const words = (value) =>
    typeof value === "number"
      ? Math.abs(value) >= 1e6
        ? short(value)
        : number(value)
      : typeof value === "object"
        ? JSON.stringify(value)
        : String(value);
  const draw = () => {
    const found = [...(page.run.events ?? [])].reverse();
    if (!found.length) return fill(root, h("div", { class: "card" }, state("folder", "No events yet")));
    const rows = found.map((event) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, visible(event.event).replaceAll("_", " ")),
        h("td", { class: "right" }, whole(event.step)),
        h("td", {}, moment(event.time, page.live.now())),
        h(
          "td",
          { class: "text muted small" },
          Object.entries(event)
            .filter(([name, value]) => !skipped.has(name) && value !== null)
            .map(([name, value]) => `${visible(name)} ${visible(words(value))}`)
            .join(" · "),
        ),
      ),
    );
    return fill(root, tableCard("Events", [["Event"], ["Step", true], ["When"], ["Details"]], rows));
  };
  draw();
  page.onChange((kinds) => (kinds === null || kinds.includes("event")) && setTimeout(draw, 600));
}

export function config(root, page) {
  loaded(root, page, "config", ({ text, bindings }) => {
    if (!text && !bindings?.length)
      return fill(root, h("div", { class: "card" }, state("folder", NONE, "The run folder has no config.gin.")));
    const table = h("div", {});
    const draw = (search) => {
      let expression = null;
      try {
        expression = views.expression(search);
      } catch {
        return; // half typed
      }
      const rows = bindings
        .filter((one) => !expression || expression.test(`${one.name} = ${one.value}`))
        .map((one) => h("tr", {}, h("th", { scope: "row" }, visible(one.name)), h("td", {}, visible(one.value))));
      fill(
        table,
        rows.length
          ? tableCard("Bindings", [["Binding"], ["Value"]], rows, { class: "gin dense" })
          : h("div", { class: "card" }, state("search", "No binding matches")),
      );
    };
    const save = h(
      "button",
      {
        type: "button",
        class: "button",
        onclick: () => {
          const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
          download(url, "config.gin");
          setTimeout(() => URL.revokeObjectURL(url), 10_000);
        },
      },
      "Save as config.gin",
    );
    fill(
      root,
      h(
        "div",
        { class: "filters" },
        searchBox("Search bindings by regular expression", "Search bindings", "", draw),
        save,
      ),
      table,
      h(
        "details",
        { class: "section" },
        h("summary", {}, h("h2", {}, "As written")),
        h(
          "div",
          { class: "card" },
          h("pre", { class: "config", tabindex: "0", role: "region", "aria-label": "config.gin" }, visible(text)),
        ),
      ),
    );
    return draw("");
  });
}
