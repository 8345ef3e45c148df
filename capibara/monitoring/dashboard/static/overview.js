// A run's charts, and where its time went.

import { get, isAbort } from "./api.js";
import { Board } from "./board.js";
import { chartSections } from "./charts.js";
import { fill, h } from "./dom.js";
import { visible } from "./format.js";
import { goodputCard } from "./parts.js";
import { lineName, sections } from "./specs.js";

const GOODPUT_MS = 5_000;

export function show(root, page) {
  const board = runBoard(page);
  const time = h("div", { class: "wide", vars: { "grid-column": "1 / -1", display: "grid" } });
  const charts = chartSections(
    root,
    board,
    () => sections(page.metricNames()),
    (name) => (name === "Speed" ? time : null),
  );
  page.onMetrics(() => charts.redraw());
  root.append(
    pictures(page),
    h(
      "p",
      { class: "foot" },
      "In a chart: drag to zoom, double-click for all. With the keyboard: ",
      h("kbd", {}, "←"),
      " ",
      h("kbd", {}, "→"),
      " move, ",
      h("kbd", {}, "+"),
      " ",
      h("kbd", {}, "−"),
      " zoom, ",
      h("kbd", {}, "0"),
      " shows all. Dotted lines: starts and roll-backs. ✕: not finite.",
    ),
  );
  let loaded = 0;
  const load = async () => {
    if (Date.now() - loaded < GOODPUT_MS) return;
    loaded = Date.now();
    try {
      fill(time, goodputCard(await get(`/api/runs/${page.id}/goodput`, {}, page.signal)));
    } catch (error) {
      if (!isAbort(error) && !time.firstChild) fill(time, goodputCard({ unavailable: error.message }));
    }
  };
  load();
  page.onChange((kinds) => {
    if (kinds === null) board.reload();
    else board.update([page.id], kinds);
    load();
  });
}

/** Charts of one run: a colour for each line of a chart. */
export function runBoard(page) {
  return new Board({
    runs: [page.id],
    signal: page.signal,
    marks: (axis) => marks(page.run, axis),
    style: (_, metric, spec) => {
      const at = spec.metrics.indexOf(metric);
      const isLimit = metric.endsWith("_limit_bytes");
      return { name: lineName(metric), slot: isLimit ? 8 : at + 1, dash: isLimit ? "dash" : "solid" };
    },
  });
}

/** Later starts and roll-backs, as x values. */
function marks(run, axis) {
  const tokens = run.start?.tokens_per_step;
  const x = {
    step: (event) => event.step,
    time: (event) => event.time,
    relative: (event) => event.time - run.started,
    tokens: (event) => event.step * tokens,
  }[axis];
  const starts = (run.events ?? []).filter((event) => event.event === "start").slice(1);
  const backs = (run.events ?? []).filter((event) => event.event === "roll_back");
  return [...starts, ...backs]
    .map((event) => ({ x: x(event), kind: event.event }))
    .filter(({ x: value }) => Number.isFinite(value));
}

function pictures(page) {
  const names = page.run.images ?? [];
  if (!names.length) return h("div", {});
  return h(
    "section",
    { class: "section" },
    h("header", {}, h("h2", {}, "Pictures")),
    h(
      "div",
      { class: "pictures" },
      names.map((name) =>
        h(
          "figure",
          { class: "card pad" },
          h("img", {
            src: `/api/runs/${page.id}/image/${encodeURIComponent(name)}`,
            alt: visible(name),
            loading: "lazy",
          }),
          h("figcaption", {}, visible(name)),
        ),
      ),
    ),
  );
}
