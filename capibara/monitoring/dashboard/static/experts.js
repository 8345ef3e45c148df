// A mixture of experts: how the tokens were shared among them.

import { chartSections } from "./charts.js";
import { heatMap } from "./chart.js";
import { fill, h } from "./dom.js";
import { number, percent, whole } from "./format.js";
import { runBoard } from "./overview.js";
import { tableCard, tiles } from "./parts.js";
import { loaded } from "./tab.js";

export function show(root, page) {
  const plot = h("div", {
    class: "plot",
    tabindex: "0",
    role: "img",
    "aria-label": "Load of each expert over the steps",
  });
  const map = h(
    "figure",
    { class: "card panel wide" },
    h(
      "div",
      { class: "panel-head" },
      h(
        "div",
        { class: "titles" },
        h("h3", {}, "Expert utilisation"),
        h("span", { class: "muted small" }, "load relative to an even share: 1× is even"),
      ),
    ),
    plot,
  );
  const figures = h("div", {});
  const table = h("div", {});
  const main = h("div", { class: "stacked" });
  const charts = h("div", { class: "after" });
  root.append(main, charts);
  let drawn = null;
  const draw = (answer) => {
    if (!main.contains(map)) fill(main, h("h2", { class: "sr-only" }, "Experts"), figures, map, table);
    drawn = answer;
    const last = answer.load.at(-1) ?? [];
    const known = last.filter((one) => one !== null);
    fill(
      figures,
      tiles([
        ["Experts", whole(answer.experts)],
        ["Router entropy", percent(answer.entropy?.at(-1))],
        ["Busiest expert", known.length ? `${number(Math.max(...known), 3)}×` : "unavailable"],
        ["Idlest expert", known.length ? `${number(Math.min(...known), 3)}×` : "unavailable"],
        ["Dropped tokens", percent(answer.dropped?.at(-1))],
      ]),
    );
    drawMap(plot, answer);
    fill(table, tableOf(answer));
  };
  loaded(main, page, "experts", draw, ["train"], { points: 200 });
  document.addEventListener("theme", () => drawn && drawMap(plot, drawn), { signal: page.signal });

  const names = page.metricNames();
  const only = (...wanted) => wanted.filter((name) => names.includes(name));
  const specs = [
    { title: "Router entropy", metrics: only("train/router_entropy") },
    {
      title: "Load of the busiest and the idlest expert",
      metrics: only("train/expert_load_max", "train/expert_load_min"),
    },
    { title: "Dropped tokens", metrics: names.filter((name) => /^train\/.*dropped/.test(name)) },
  ].filter((spec) => spec.metrics.length);
  const board = runBoard(page);
  chartSections(charts, board, () => [["Over the steps", specs]]);
  page.onChange((kinds) => (kinds === null ? board.reload() : board.update([page.id], kinds)));
}

function drawMap(plot, { experts, steps, load }) {
  plot.style.setProperty("height", `${Math.min(560, Math.max(190, 64 + 19 * experts))}px`);
  const names = Array.from({ length: experts }, (_, at) => `${at}`);
  const all = load.flat().filter((one) => one !== null);
  const far = Math.max(0.25, ...all.map((one) => Math.abs(one - 1)));
  plot.setAttribute(
    "aria-label",
    `Load of ${experts} experts from step ${whole(steps[0])} to ${whole(steps.at(-1))}, relative to an even share: ` +
      `lowest ${number(Math.min(...all), 3)}, highest ${number(Math.max(...all), 3)}. The newest values are in the table.`,
  );
  const z = names.map((_, expert) => load.map((row) => row[expert]));
  heatMap(plot, {
    x: steps,
    y: names,
    z,
    xTitle: "step",
    low: Math.max(0, 1 - far),
    middle: 1,
    high: 1 + far,
    name: "load",
  }).catch((error) => fill(plot, h("p", {}, error.message)));
}

function tableOf({ load, steps }) {
  const last = load.at(-1) ?? [];
  const first = load[0] ?? [];
  const rows = last.map((one, expert) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, `expert ${expert}`),
      h("td", { class: "right" }, `${number(first[expert], 3)}×`),
      h("td", { class: "right" }, `${number(one, 3)}×`),
    ),
  );
  return h(
    "details",
    { class: "section" },
    h("summary", {}, h("h2", {}, "Loads as a table")),
    tableCard(
      "Load of each expert",
      [["Expert"], [`At step ${whole(steps[0])}`, true], [`At step ${whole(steps.at(-1))}`, true]],
      rows,
      { class: "dense" },
    ),
  );
}
