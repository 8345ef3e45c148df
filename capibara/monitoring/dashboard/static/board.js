// Panels of charts: loads what is seen, follows what is new, and draws it over one range.

import { get, isAbort } from "./api.js";
import { h } from "./dom.js";
import { Panel } from "./panel.js";
import * as views from "./view.js";

const MOST_SERIES = 40; // of one request, as the server says
const POINTS = 720; // two for each pixel of a narrow chart
const POINTS_WIDE = 2400;
const FOLLOW_MS = 1_000;
const MOST_FOLLOWED = 500; // points added to a line before it is loaded again, thinned out
const RANGE_MS = 140;

const key = (run, metric) => `${run}|${metric}`;
const kindOf = (metric) => metric.slice(0, metric.indexOf("/"));

/**
 * Charts of several runs and metrics that share their x axis.
 * `style(run, metric)` gives {name, slot, dash}.
 */
export class Board {
  constructor({ runs, style, signal, onRange = () => {}, marks = () => [] }) {
    this.runs = runs;
    this.style = style;
    this.signal = signal;
    this.marks = marks;
    this.panels = [];
    this.data = new Map();
    this.changed = onRange;
    this._epoch = 0;
    this._seen = new Set();
    this._stale = new Set();
    this._timers = {};
    this._observer = new IntersectionObserver((entries) => this._looked(entries), { rootMargin: "320px 0px" });
    const redraw = () => this.redraw();
    document.addEventListener("theme", redraw);
    document.addEventListener("visibilitychange", () => document.hidden || this._follow());
    signal.addEventListener("abort", () => {
      this._observer.disconnect();
      document.removeEventListener("theme", redraw);
      for (const timer of Object.values(this._timers)) clearTimeout(timer);
    });
  }

  options() {
    return views.chartOptions(views.current().params);
  }

  /** A new panel; the caller puts its element somewhere. */
  add(spec) {
    const owner = {
      options: () => this.options(),
      marks: () => this.marks(this.options().x),
      onRange: (from, to) => this.setRange(from, to),
      onWide: (panel) => this._wide(panel),
    };
    const panel = new Panel(spec, owner);
    this.panels.push(panel);
    panel.setWide(this.options().wide.includes(spec.title));
    if (!spec.metrics.length) panel.say("unavailable", spec.absent);
    else {
      this._stale.add(panel);
      this._observer.observe(panel.el);
    }
    return panel;
  }

  clear() {
    this._observer.disconnect();
    this.panels = [];
    this._seen.clear();
    this._stale.clear();
  }

  setRange(from, to) {
    const tidy = (value) => (value === null ? null : Number(value.toPrecision(10)));
    const step = (value) => (value === null || this.options().x !== "step" ? tidy(value) : Math.round(value));
    views.change({ from: step(from), to: step(to) });
    this.changed();
    clearTimeout(this._timers.range);
    this._timers.range = setTimeout(() => this.reload(), RANGE_MS);
  }

  _wide(panel) {
    const wide = !panel.el.classList.contains("wide");
    panel.setWide(wide);
    views.change({ wide: this.panels.filter((one) => one.el.classList.contains("wide")).map((one) => one.spec.title) });
    this._stale.add(panel);
    this._load();
  }

  redraw() {
    for (const panel of this._seen) if (panel.drawn) panel.show(panel.lines);
  }

  /** Everything again: another axis, range or smoothing, or the points may be void. */
  reload() {
    this._epoch += 1;
    this.data.clear();
    this.panels.forEach((panel) => panel.spec.metrics.length && this._stale.add(panel));
    this._load();
  }

  _looked(entries) {
    for (const entry of entries) {
      const panel = this.panels.find((one) => one.el === entry.target);
      if (panel && entry.isIntersecting) this._seen.add(panel);
      else this._seen.delete(panel);
    }
    clearTimeout(this._timers.load);
    this._timers.load = setTimeout(() => this._load(), 10);
  }

  async _load() {
    const panels = [...this._seen].filter((panel) => this._stale.has(panel));
    panels.forEach((panel) => this._stale.delete(panel));
    for (const wide of [false, true]) {
      const some = panels.filter((panel) => panel.el.classList.contains("wide") === wide);
      const metrics = [...new Set(some.flatMap((panel) => panel.spec.metrics))];
      const size = Math.max(1, Math.floor(MOST_SERIES / this.runs.length));
      for (let at = 0; at < metrics.length; at += size)
        this._loadSome(metrics.slice(at, at + size), some, wide ? POINTS_WIDE : POINTS);
    }
  }

  async _loadSome(metrics, panels, points) {
    const epoch = this._epoch;
    const mine = panels.filter((panel) => panel.spec.metrics.some((metric) => metrics.includes(metric)));
    const { x, from, to, smooth } = this.options();
    mine.forEach((panel) => panel.el.setAttribute("aria-busy", "true"));
    try {
      const answer = await get(
        "/api/series",
        { run: this.runs, metric: metrics, x, from, to, points, smooth: smooth || null },
        this.signal,
      );
      if (epoch !== this._epoch) return;
      for (const line of answer.series) this.data.set(key(line.run, line.metric), { ...line, added: 0 });
      for (const panel of mine.sort((one, two) => this.panels.indexOf(one) - this.panels.indexOf(two))) {
        await this._show(panel);
        await new Promise((resolve) => setTimeout(resolve)); // what is drawn is seen before the next is
        if (epoch !== this._epoch) return;
      }
    } catch (error) {
      if (isAbort(error) || epoch !== this._epoch) return;
      const again = h(
        "button",
        {
          type: "button",
          class: "button",
          onclick: () => {
            mine.forEach((panel) => {
              panel.waiting();
              this._stale.add(panel);
            });
            this._load();
          },
        },
        "Try again",
      );
      mine.forEach((panel, at) =>
        panel.drawn ? this._stale.add(panel) : panel.say("not loaded", error.message, at === 0 && again),
      );
    } finally {
      mine.forEach((panel) => panel.el.removeAttribute("aria-busy"));
    }
  }

  _show(panel) {
    const lines = this.runs
      .flatMap((run) => panel.spec.metrics.map((metric) => this.data.get(key(run, metric))))
      .filter(Boolean)
      .map((line) => ({ ...line, ...this.style(line.run, line.metric, panel.spec) }));
    if (!lines.length) return panel.say("unavailable", panel.spec.absent ?? "No run has this metric.");
    if (lines.every((line) => !line.x.length && !line.nonfinite.length)) {
      return panel.say(
        "no values in this range",
        null,
        h("button", { type: "button", class: "button", onclick: () => this.setRange(null, null) }, "Show all"),
      );
    }
    return panel.show(lines);
  }

  /** Some runs have more lines of some kinds. */
  update(runs, kinds) {
    this._fresh ??= { runs: new Set(), kinds: new Set() };
    runs.forEach((run) => this.runs.includes(run) && this._fresh.runs.add(run));
    kinds.forEach((kind) => this._fresh.kinds.add(kind));
    this._follow();
  }

  _follow() {
    if (this._timers.follow || document.hidden || !this._fresh?.runs.size) return;
    const pause_ms = Math.max(0, (this._followed ?? 0) + FOLLOW_MS - performance.now());
    this._timers.follow = setTimeout(() => {
      this._timers.follow = 0;
      this._followed = performance.now();
      const { runs, kinds } = this._fresh;
      this._fresh = null;
      this._append([...runs], kinds);
    }, pause_ms);
  }

  async _append(runs, kinds) {
    const { x, to, smooth } = this.options();
    if (to !== null) return;
    const shown = [...this._seen].filter((panel) => panel.lines.length);
    const epoch = this._epoch;
    for (const kind of kinds) {
      const metrics = [...new Set(shown.flatMap((panel) => panel.spec.metrics))].filter(
        (metric) => kindOf(metric) === kind,
      );
      const lines = runs
        .flatMap((run) => metrics.map((metric) => this.data.get(key(run, metric))))
        .filter((line) => line?.x.length);
      if (!lines.length) continue;
      if (lines.some((line) => line.added > MOST_FOLLOWED)) {
        this.reload();
        return;
      }
      const from = Math.min(...lines.map((line) => line.x.at(-1)));
      const size = Math.max(1, Math.floor(MOST_SERIES / runs.length));
      for (let at = 0; at < metrics.length; at += size) {
        try {
          const answer = await get(
            "/api/series",
            { run: runs, metric: metrics.slice(at, at + size), x, from, points: POINTS, smooth: smooth || null },
            this.signal,
          );
          if (epoch !== this._epoch) return;
          this._grow(answer.series);
        } catch (error) {
          if (isAbort(error)) return; // what was missed comes with the next update
        }
      }
    }
  }

  _grow(series) {
    const grown = new Set();
    for (const more of series) {
      const line = this.data.get(key(more.run, more.metric));
      const last = line?.x.at(-1) ?? -Infinity;
      const first = more.x.findIndex((x) => x > last);
      if (!line || first < 0) continue;
      line.x = line.x.concat(more.x.slice(first));
      line.y = line.y.concat(more.y.slice(first));
      if (line.smooth && more.smooth) line.smooth = line.smooth.concat(more.smooth.slice(first));
      line.nonfinite = line.nonfinite.concat(more.nonfinite.filter((x) => x > last));
      line.range = [line.range[0], line.x.at(-1)];
      line.added += more.x.length - first;
      grown.add(more.metric);
    }
    for (const panel of this._seen)
      if (panel.lines.length && panel.spec.metrics.some((metric) => grown.has(metric))) this._show(panel);
  }
}
