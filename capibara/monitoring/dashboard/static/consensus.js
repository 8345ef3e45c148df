// Nodes of consensus training: the score, who took part, and why others did not.

import { chartSections } from "./charts.js";
import { heatMap } from "./chart.js";
import { fill, h } from "./dom.js";
import { NONE, has, number, percent, visible, whole } from "./format.js";
import { runBoard } from "./overview.js";
import { bdi, cell, tableCard, tiles } from "./parts.js";
import { loaded } from "./tab.js";
import { colour } from "./theme.js";

const STATES = {
  accepted: ["good", "accepted"],
  not_drawn: ["", "not drawn"],
  rejected: ["warn", "rejected"],
  absent: ["warn", "absent"],
  quarantined: ["bad", "quarantined"],
};

export function show(root, page) {
  const figures = h("div", {});
  const table = h("div", {});
  const plot = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": "Accepted nodes over the steps" });
  const history = h(
    "figure",
    { class: "card panel wide" },
    h(
      "div",
      { class: "panel-head" },
      h("div", { class: "titles" }, h("h3", {}, "Share of the rounds in which a node was accepted")),
    ),
    plot,
  );
  const main = h("div", { class: "stacked" });
  const charts = h("div", { class: "after" });
  root.append(main, charts);
  let drawn = null;
  const draw = (answer) => {
    if (!main.contains(table)) fill(main, h("h2", { class: "sr-only" }, "Nodes"), figures, table, history);
    fill(
      figures,
      tiles([
        ["Consensus score", percent(answer.score)],
        ["Nodes", whole(answer.nodes.length)],
        ["Accepted now", whole(answer.nodes.filter((node) => node.state === "accepted").length)],
        ["Failed rounds", whole(answer.failed_rounds)],
        ["Spare faults", whole(answer.spare_faults)],
        ["Votes", whole(answer.votes)],
      ]),
    );
    if (answer.line) figures.append(h("p", { class: "muted" }, visible(answer.line)));
    fill(table, nodes(answer));
    drawn = answer.history;
    drawHistory(plot, drawn, answer.nodes);
  };
  loaded(main, page, "nodes", draw, ["train"]);
  document.addEventListener("theme", () => drawn && drawHistory(plot, drawn, []), { signal: page.signal });

  const names = page.metricNames();
  const board = runBoard(page);
  const per = (field) => names.filter((metric) => new RegExp(`^train/node_\\d+/${field}$`).test(metric)).slice(0, 8);
  const specs = [
    { title: "Consensus score", metrics: names.filter((name) => name === "train/consensus_score") },
    ...["loss", "quality", "distance"].map((field) => ({
      title: `${field.charAt(0).toUpperCase()}${field.slice(1)} of each node`,
      metrics: per(field),
    })),
  ].filter((spec) => spec.metrics.length);
  board.style = (_, metric, spec) => ({
    name: /node_\d+/.exec(metric)?.[0].replace("_", " ") ?? "score",
    slot: (spec.metrics.indexOf(metric) % 8) + 1,
    dash: "solid",
  });
  chartSections(charts, board, () => [["Over the steps", specs]]);
  page.onChange((kinds) => (kinds === null ? board.reload() : board.update([page.id], kinds)));
}

function nodes(answer) {
  const rows = answer.nodes.map((node) => {
    const [tone, words] = STATES[node.state] ?? ["", visible(node.state)];
    const since = has(node.last_rejected) ? `step ${whole(node.last_rejected)}` : "never";
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, bdi(node.name)),
      h("td", {}, h("span", { class: `pill ${tone}` }, words)),
      h(
        "td",
        { class: "text" },
        node.reason ? visible(node.reason) : h("span", { class: "muted" }, "—"),
        has(node.until) && ` until round ${whole(node.until)}`,
      ),
      cell(number(node.loss), { class: "right" }),
      cell(number(node.quality), { class: "right" }),
      cell(number(node.distance), { class: "right" }),
      cell(number(node.weight), { class: "right" }),
      h("td", { class: "right" }, whole(node.rejections)),
      h("td", { class: "right" }, since),
    );
  });
  return tableCard(
    "Nodes",
    [
      ["Node"],
      ["State"],
      ["Reason"],
      ["Loss", true],
      ["Quality", true],
      ["Distance", true],
      ["Weight", true],
      ["Rounds rejected", true],
      ["Last rejected", true],
    ],
    rows,
  );
}

function drawHistory(plot, history, found) {
  if (!history?.steps?.length) {
    fill(plot, h("p", { class: "unavailable" }, NONE));
    return;
  }
  const count = history.accepted[0]?.length ?? 0;
  const names =
    found.length === count
      ? found.map((node) => visible(node.name).replace("_", " "))
      : (plot.names ?? Array.from({ length: count }, (_, at) => `node ${at}`));
  plot.names = names;
  plot.style.setProperty("height", `${Math.min(420, 70 + 34 * count)}px`);
  const z = names.map((_, node) => history.accepted.map((row) => row[node]));
  const out = names.filter((_, node) => z[node].some((one) => one !== null && one < 1));
  plot.setAttribute(
    "aria-label",
    `Accepted nodes from step ${whole(history.steps[0])} to ${whole(history.steps.at(-1))}. ` +
      `${out.length ? `Rejected at times: ${out.join(", ")}.` : "All were accepted throughout."}`,
  );
  const discrete = [
    [0, colour("fill-bad")],
    [1, colour("fill-good")],
  ];
  heatMap(plot, {
    x: history.steps,
    y: names,
    z,
    xTitle: "step",
    low: 0,
    middle: 0.5,
    high: 1,
    name: "accepted",
    discrete,
  }).catch((error) => fill(plot, h("p", {}, error.message)));
}
