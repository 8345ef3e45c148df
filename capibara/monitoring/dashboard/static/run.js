// One run: what it is, how far it is, its newest figures, and a tab for each of its sides.

import { alertNotice } from "./alerts.js";
import { get, isAbort } from "./api.js";
import { plotly } from "./chart.js";
import { fill, h, pageState, skeleton } from "./dom.js";
import { duration, has, NONE, percent, short, visible, whole } from "./format.js";
import { Figure, bdi, figuresOf, moment, progressShare, statusPill } from "./parts.js";
import * as consensus from "./consensus.js";
import * as experts from "./experts.js";
import * as facts from "./facts.js";
import * as overview from "./overview.js";
import * as samples from "./samples.js";
import * as views from "./view.js";

const TABS = [
  ["overview", "Overview", overview.show],
  ["consensus", "Consensus", consensus.show],
  ["experts", "Experts", experts.show],
  ["samples", "Samples", samples.show],
  ["checkpoints", "Checkpoints", facts.checkpoints],
  ["lineage", "Lineage", facts.lineage],
  ["plan", "Plan", facts.plan],
  ["events", "Events", facts.events],
  ["config", "Configuration", facts.config],
];
const RENEW_MS = 1_000;
const SPARK_POINTS = 240;
const SPARK_MEANS = 60; // lowest and highest points alone would show only how far noise reaches

/** The means of `count` parts of a list; a short list as it is. */
export function means(values, count) {
  if (values.length <= count) return values;
  return Array.from({ length: count }, (_, at) => {
    const part = values.slice(Math.floor((at * values.length) / count), Math.floor(((at + 1) * values.length) / count));
    return part.reduce((sum, one) => sum + one, 0) / part.length;
  });
}

export function show(root, context) {
  new RunPage(root, context).begin();
}

class RunPage {
  constructor(root, { view, live, signal, setTitle }) {
    Object.assign(this, { root, live, signal, setTitle, id: view.id, tab: view.tab, timer: 0, run: null });
    this.head = h("div", {}, skeleton(130));
    this.about = h("div", {});
    this.alerts = h("div", {});
    this.figures = h("dl", { class: "figures" });
    this.body = h("div", { class: "tab-body" });
    this.cards = figuresOf({}).map(({ name }) => new Figure(name));
    this.sparks = new Map();
    this.hooks = [];
  }

  async begin() {
    this.setTitle("Run");
    fill(this.root, this.head, this.alerts);
    if (this.tab === "overview") plotly().catch(() => {}); // large: it loads beside the run
    try {
      this.run = await get(`/api/runs/${this.id}`, {}, this.signal);
    } catch (error) {
      if (isAbort(error)) return;
      const title = error.status === 404 ? "There is no such run" : "The run could not be loaded";
      fill(
        this.root,
        pageState(
          error.status === 404 ? "folder" : "warn",
          title,
          error.status === 404 ? "It may have been moved or removed." : error.message,
          h("a", { class: "button", href: views.to("runs") }, "All runs"),
          error.status !== 404 &&
            h("button", { type: "button", class: "button", onclick: () => this.begin() }, "Try again"),
        ),
      );
      return;
    }
    this.setTitle(visible(this.run.name));
    const showsFigures = this.tab === "overview";
    fill(
      this.figures,
      this.cards.map((card) => card.el),
    );
    fill(this.root, this.head, this.alerts, showsFigures && this.figures, this.tabs(), this.body);
    this.draw();
    this.listen();
    this.loadAlerts();
    if (showsFigures) this.loadSparks();
    const show = TABS.find(([name]) => name === this.tab)[2];
    show(this.body, this);
    const current = this.root.querySelector(".tabs a[aria-current]");
    if (current) current.parentElement.scrollLeft = current.offsetLeft - 60;
  }

  /** Calls `react(kinds)` when the run has new lines, and `react(null)` when all that is shown may be void. */
  onChange(react) {
    this.hooks.push(react);
  }

  /** Calls `react` when the run has other metrics than before, such as those of a first evaluation. */
  onMetrics(react) {
    let known = this.metricNames().join();
    this.metricHook = () => {
      const names = this.metricNames().join();
      if (names !== known) react();
      known = names;
    };
  }

  listen() {
    const on = (name, react) =>
      this.live.addEventListener(name, (event) => react(event.detail), { signal: this.signal });
    on("update", ({ runs }) => {
      const own = runs.find((run) => run.id === this.id);
      if (own) this.renew(own.kinds ?? ["train", "eval", "system", "sample", "event"]);
    });
    on("reload", ({ id }) => id === this.id && this.renew(null));
    on("resync", () => this.renew(null));
    on("alert", (alert) => alert.run === this.id && this.loadAlerts());
  }

  renew(kinds) {
    this.pending = kinds === null || this.pending === null ? null : new Set([...(this.pending ?? []), ...kinds]);
    this.timer ||= setTimeout(
      async () => {
        const found = this.pending === null ? null : [...this.pending];
        this.pending = undefined;
        this.timer = 0;
        this.hooks.forEach((react) => react(found));
        try {
          this.run = await get(`/api/runs/${this.id}`, {}, this.signal);
          this.draw();
          this.metricHook?.();
          if (this.tab === "overview") this.loadSparks();
        } catch (error) {
          if (!isAbort(error)) return; // the next update shows it
        }
      },
      document.hidden ? 10 * RENEW_MS : RENEW_MS / 2,
    );
  }

  draw() {
    const { run } = this;
    const at = run.name.lastIndexOf("/") + 1;
    const fact = (name, text) => text && text !== NONE && h("span", {}, h("span", { class: "muted" }, name), text);
    const devices = run.device_kind && `${run.device_count ?? "?"} × ${visible(run.device_kind)}`;
    const commit = run.facts?.git?.commit;
    // Made once: what has the focus must stay.
    this.crumbs ??= h(
      "nav",
      { "aria-label": "Where this is" },
      h(
        "ol",
        { class: "crumbs" },
        h("li", {}, h("a", { href: views.to("runs") }, "Runs")),
        at > 0 && h("li", {}, bdi(run.name.slice(0, at - 1))),
      ),
    );
    if (!this.crumbs.isConnected) fill(this.head, this.crumbs, this.about);
    fill(
      this.about,
      h(
        "div",
        { class: "title-line" },
        h("h1", {}, bdi(run.name.slice(at))),
        statusPill(run.status),
        run.loading && h("span", { class: "pill" }, `reading ${percent(run.share_read, 0)}`),
      ),
      h(
        "div",
        { class: "facts" },
        fact("on", devices),
        fact("parameters", short(run.param_count)),
        fact("tokens", short(run.tokens)),
        fact("starts", whole(run.starts)),
        commit && fact("commit", h("span", { class: "mono" }, visible(String(commit).slice(0, 8)))),
        h("span", {}, h("span", { class: "muted" }, "updated"), moment(run.updated, this.live.now())),
      ),
      run.fault && h("div", { class: "notice bad" }, visible(run.fault)),
      this.progress(),
    );
    figuresOf(run).forEach(({ metric, text, unit, about }, at_) =>
      this.cards[at_].show(text, unit, about, metric ? this.sparks.get(metric) : run.goodput),
    );
  }

  progress() {
    const share = progressShare(this.run);
    if (share === null)
      return h(
        "div",
        { class: "progress" },
        h("div", { class: "words" }, h("span", {}, h("strong", { class: "num" }, `Step ${whole(this.run.step)}`))),
      );
    const { run } = this;
    const left = run.status === "running" && has(run.eta_s) ? `${duration(run.eta_s)} left` : "";
    return h(
      "div",
      { class: "progress" },
      h(
        "div",
        { class: "words num" },
        h("span", {}, "Step ", h("strong", {}, whole(run.step)), ` of ${whole(run.total_steps)}`),
        h("span", {}, percent(share)),
        h("span", { class: "end" }, left),
      ),
      h(
        "div",
        {
          class: "track",
          role: "progressbar",
          "aria-label": "Steps",
          "aria-valuemin": 0,
          "aria-valuemax": run.total_steps,
          "aria-valuenow": Math.min(run.step, run.total_steps),
        },
        h("span", { vars: { width: `${100 * share}%` } }),
      ),
    );
  }

  tabs() {
    const there = { consensus: this.run.tabs?.nodes, experts: this.run.tabs?.experts, samples: this.run.tabs?.samples };
    return h(
      "nav",
      { class: "tabs", "aria-label": "Sides of the run" },
      TABS.filter(([name]) => there[name] !== false || name === this.tab).map(([name, text]) =>
        h(
          "a",
          { href: views.to("run", { id: this.id, tab: name }), "aria-current": name === this.tab ? "page" : null },
          text,
        ),
      ),
    );
  }

  async loadAlerts() {
    try {
      const { alerts } = await get("/api/alerts", { run: this.id, active: 1 }, this.signal);
      fill(
        this.alerts,
        alerts.slice(0, 4).map((alert) => alertNotice(alert, this.live.now())),
        alerts.length > 0 && h("div", { vars: { height: "16px" } }),
      );
    } catch (error) {
      if (!isAbort(error)) fill(this.alerts, h("p", { class: "muted small" }, "Alerts could not be loaded."));
    }
  }

  async loadSparks() {
    const metrics = figuresOf({})
      .map(({ metric }) => metric)
      .filter((metric) => metric && this.has(metric));
    if (!metrics.length) return;
    try {
      const { series } = await get("/api/series", { run: this.id, metric: metrics, points: SPARK_POINTS }, this.signal);
      for (const line of series) this.sparks.set(line.metric, means(line.y, SPARK_MEANS));
      this.draw();
    } catch (error) {
      if (!isAbort(error)) return; // figures stand without their lines
    }
  }

  has(metric) {
    return Object.values(this.run.metrics ?? {}).some((group) => group.some(({ name }) => name === metric));
  }

  metricNames() {
    return Object.values(this.run.metrics ?? {}).flatMap((group) => group.map(({ name }) => name));
  }
}
