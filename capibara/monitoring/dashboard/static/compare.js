// Runs beside each other: their curves, their metrics, and how their configurations differ.

import { get, isAbort } from "./api.js";
import { Board } from "./board.js";
import { chartSections } from "./charts.js";
import { fill, h, iconButton, pageState, skeleton, state } from "./dom.js";
import { visible, whole, withUnit } from "./format.js";
import { bdi, cell, statusPill, tableCard } from "./parts.js";
import { comparison } from "./specs.js";
import * as views from "./view.js";

const COLOURS = 8;
const DASHES = ["solid", "dash", "dot"]; // the ninth run has the first colour, dashed
const MOST = 20;
const RENEW_MS = 5_000;
const RENEW_EMPTY_MS = 500; // while the runs have no metrics yet

export function show(root, context) {
  new ComparePage(root, context).begin();
}

class ComparePage {
  constructor(root, { live, signal, setTitle }) {
    Object.assign(this, { root, live, signal, setTitle });
    this.runs = [...new Set(views.current().params.getAll("run"))].slice(0, MOST);
    this.chips = h("div", { class: "chips" });
    this.metrics = [];
    this.charts = h("div", {});
    this.tables = h("div", {}, skeleton(200));
  }

  async begin() {
    this.setTitle("Compare");
    fill(
      this.root,
      h(
        "div",
        { class: "page-head" },
        h("div", { class: "grow" }, h("h1", {}, "Compare runs"), h("p", {}, "Each run has its colour in all charts.")),
      ),
      this.chips,
    );
    try {
      const { runs } = await get("/api/runs", { limit: 1000, sort: "updated" }, this.signal);
      this.all = runs;
    } catch (error) {
      if (!isAbort(error))
        fill(
          this.root,
          pageState(
            "warn",
            "The runs could not be loaded",
            error.message,
            h("button", { type: "button", class: "button", onclick: () => this.begin() }, "Try again"),
          ),
        );
      return;
    }
    const there = new Map(this.all.map((run) => [run.id, run]));
    this.names = this.shortNames(this.runs.map((id) => there.get(id)?.name ?? id));
    this.drawChips(there);
    if (this.runs.length < 2) {
      this.root.append(
        h(
          "div",
          { class: "card", vars: { "margin-top": "18px" } },
          state(
            "tune",
            "Choose two runs or more",
            "Add them here, or mark them in the list of runs.",
            h("a", { class: "button", href: views.to("runs", { params: { run: this.runs } }) }, "All runs"),
          ),
        ),
      );
      return;
    }
    this.root.append(this.charts, this.tables);
    await this.load();
  }

  /** Names without what all have in front. */
  shortNames(names) {
    const parts = names.map((name) => name.split("/"));
    let same = 0;
    while (parts.length > 1 && parts.every((one) => one.length > same + 1 && one[same] === parts[0][same])) same += 1;
    return new Map(this.runs.map((id, at) => [id, visible(parts[at].slice(same).join("/"))]));
  }

  style(run) {
    const at = this.runs.indexOf(run);
    return {
      name: this.names.get(run),
      slot: (at % COLOURS) + 1,
      dash: DASHES[Math.floor(at / COLOURS) % DASHES.length],
    };
  }

  swatch(run) {
    const { slot, dash } = this.style(run);
    return h("span", {
      class: `swatch ${dash === "solid" ? "" : dash}`,
      vars: { "border-color": `var(--series-${slot})` },
    });
  }

  drawChips(there) {
    const go = (runs) => {
      location.hash = views.format({ page: "compare", id: "", tab: "", params: this.params(runs) });
    };
    const others = this.all.filter((run) => !this.runs.includes(run.id));
    const add = h(
      "select",
      { "aria-label": "Add a run", onchange: () => add.value && go([...this.runs, add.value]) },
      h("option", { value: "" }, "Add a run…"),
      others.slice(0, 500).map((run) => h("option", { value: run.id }, visible(run.name))),
    );
    fill(
      this.chips,
      this.runs.map((id) =>
        h(
          "span",
          { class: "chip" },
          this.swatch(id),
          h("a", { href: views.to("run", { id }) }, bdi(this.names.get(id))),
          there.has(id) && statusPill(there.get(id).status),
          iconButton("close", `Remove ${this.names.get(id)}`, () => go(this.runs.filter((one) => one !== id))),
        ),
      ),
      this.runs.length < MOST && others.length > 0 && h("span", { class: "chip" }, add),
    );
  }

  params(runs) {
    const params = new URLSearchParams(views.current().params);
    params.delete("run");
    runs.forEach((run) => params.append("run", run));
    return params;
  }

  async load() {
    try {
      const answer = await get("/api/compare", { run: this.runs }, this.signal);
      const known = this.metrics;
      this.metrics = answer.metrics.map(({ name }) => name);
      if (!this.board) this.drawCharts();
      else if (this.metrics.some((name) => !known.includes(name))) this.sections.redraw();
      this.drawTables(answer);
    } catch (error) {
      if (!isAbort(error) && !this.board)
        fill(
          this.tables,
          h(
            "div",
            { class: "card" },
            state(
              "warn",
              "The runs could not be compared",
              error.message,
              h("button", { type: "button", class: "button", onclick: () => this.load() }, "Try again"),
            ),
          ),
        );
    }
  }

  drawCharts() {
    this.board = new Board({ runs: this.runs, style: (run) => this.style(run), signal: this.signal });
    this.sections = chartSections(this.charts, this.board, () => comparison(this.metrics));
    const on = (name, react) =>
      this.live.addEventListener(name, (event) => react(event.detail), { signal: this.signal });
    on("update", ({ runs }) => {
      const own = runs.filter((run) => this.runs.includes(run.id));
      if (!own.length) return;
      this.board.update(
        own.map(({ id }) => id),
        own.flatMap(({ kinds }) => kinds ?? ["train", "eval", "system"]),
      );
      if (Date.now() - (this.renewed ?? 0) > (this.metrics.length ? RENEW_MS : RENEW_EMPTY_MS)) {
        this.renewed = Date.now();
        this.load();
      }
    });
    on("reload", ({ id }) => this.runs.includes(id) && this.board.reload());
    on("resync", () => this.board.reload());
  }

  drawTables({ metrics, config, runs }) {
    const ids = runs.map(({ id }) => id);
    const head = ids.map((id) => [
      h(
        "span",
        { vars: { display: "inline-flex", "align-items": "center", gap: "8px" } },
        this.swatch(id),
        bdi(this.names.get(id) ?? id),
      ),
      true,
    ]);
    fill(
      this.tables,
      h(
        "section",
        { class: "section" },
        h(
          "header",
          {},
          h("h2", {}, "Metrics"),
          h("span", { class: "muted small" }, "newest value; the best over the steps below it"),
        ),
        tableCard("Metrics of the runs", [["Metric"], ...head], this.metricRows(metrics)),
      ),
      h(
        "section",
        { class: "section" },
        h(
          "header",
          {},
          h("h2", {}, "Gin configuration"),
          h(
            "span",
            { class: "muted small" },
            `${whole(config.rows.length)} ${config.rows.length === 1 ? "binding differs" : "bindings differ"}, ` +
              `${whole(config.same)} are the same`,
          ),
        ),
        config.rows.length
          ? tableCard(
              "Bindings that differ",
              [["Binding"], ...head.map(([text]) => [text.cloneNode(true)])],
              this.ginRows(config.rows),
              { class: "gin" },
            )
          : h("div", { class: "card" }, state("check", "No binding differs")),
      ),
    );
  }

  metricRows(metrics) {
    const shown = metrics.filter(({ name }) => !/\/(node_\d+|expert_load)\//.test(name));
    return shown.map(({ name, unit, best, values }) => {
      const lasts = values.map((value) => value?.last).filter((one) => typeof one === "number");
      const top = lasts.length > 1 && best ? (best === "low" ? Math.min(...lasts) : Math.max(...lasts)) : null;
      const isOne = top !== null && lasts.filter((one) => one === top).length === 1;
      return h(
        "tr",
        {},
        h("th", { scope: "row" }, visible(name)),
        values.map((value) => {
          if (!value) return cell("unavailable", { class: "right" });
          const isTop = isOne && value.last === top;
          return h(
            "td",
            { class: "right" },
            h(
              "span",
              { class: isTop ? "best" : null },
              withUnit(value.last, unit),
              isTop && h("span", { class: "sr-only" }, " (best)"),
              isTop && h("span", { "aria-hidden": "true" }, " ●"),
            ),
            best &&
              typeof value.best === "number" &&
              h("div", { class: "muted small" }, `${withUnit(value.best, unit)} at ${whole(value.best_step)}`),
          );
        }),
      );
    });
  }

  ginRows(rows) {
    return rows.map(({ name, values }) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, visible(name)),
        values.map((value, at) => {
          if (value === null) return h("td", { class: "muted" }, "not set");
          return h("td", {}, at > 0 && value !== values[0] ? h("mark", {}, visible(value)) : visible(value));
        }),
      ),
    );
  }
}
