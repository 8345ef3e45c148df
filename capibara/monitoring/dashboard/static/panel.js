// A card with a chart: its name, its newest value, its tools, and the same as text and as a table.

import { address } from "./api.js";
import { draw, png, xWords } from "./chart.js";
import { download, fill, h, icon, iconButton, skeleton, toast } from "./dom.js";
import { visible, withUnit } from "./format.js";

const MOST_ROWS = 100;
let panels = 0;

/** Lowest and highest point of a line, in one pass. */
function extremes(line) {
  let low = 0;
  let high = 0;
  line.y.forEach((one, at) => {
    if (one < line.y[low]) low = at;
    if (one > line.y[high]) high = at;
  });
  return [low, high];
}

/** What a line shows, as a sentence. */
export function describe(line, axis) {
  if (!line.x.length) return `${line.name}: no values in this range.`;
  const [low, high] = extremes(line);
  const value = (at) => withUnit(line.y[at], line.unit);
  const lost = line.nonfinite?.length ? ` Not finite at ${line.nonfinite.length} points.` : "";
  return (
    `${line.name}: ${value(0)} at ${xWords(axis, line.x[0])}, ${value(line.y.length - 1)} at ${xWords(axis, line.x.at(-1))}; ` +
    `lowest ${value(low)} at ${xWords(axis, line.x[low])}, highest ${value(high)} at ${xWords(axis, line.x[high])}.${lost}`
  );
}

/** Rows of a table of several lines: at most 100 x values, of the longest line, each with the nearest earlier value. */
export function tableRows(lines) {
  const longest = lines.reduce((best, line) => (line.x.length > best.length ? line.x : best), []);
  const every = Math.max(1, Math.ceil(longest.length / MOST_ROWS));
  const xs = longest.filter((_, at) => at % every === 0 || at === longest.length - 1);
  const places = lines.map(() => -1);
  return xs.map((x) => [
    x,
    ...lines.map((line, which) => {
      while (places[which] + 1 < line.x.length && line.x[places[which] + 1] <= x) places[which] += 1;
      return places[which] < 0 ? null : line.y[places[which]];
    }),
  ]);
}

export class Panel {
  /**
   * @param {{title: string, metrics: string[], absent?: string}} spec
   * @param {{options: () => object, onRange: Function, onWide: Function, runs: () => Array}} owner
   */
  constructor(spec, owner) {
    this.spec = spec;
    this.owner = owner;
    this.lines = [];
    this.id = `panel-${(panels += 1)}`;
    this.plot = h("div", {
      class: "plot",
      tabindex: "0",
      role: "img",
      "aria-label": `${spec.title}: loading`,
      onkeydown: (event) => this._key(event),
    });
    this.now = h("span", { class: "now" });
    this.keys = h("ul", { class: "keys" });
    this.table = h("div", {
      class: "table-box",
      id: `${this.id}-table`,
      tabindex: "0",
      role: "region",
      "aria-label": `${spec.title}: values`,
      hidden: true,
    });
    this.tools = h("div", { class: "panel-tools" }, this._buttons());
    const titles = h("div", { class: "titles" }, h("h3", {}, visible(spec.title)), this.now);
    this.el = h(
      "figure",
      { class: "card panel", "aria-label": spec.title },
      h("div", { class: "panel-head" }, titles, this.tools),
      this.plot,
      this.table,
      this.keys,
    );
    this.waiting();
  }

  _buttons() {
    const name = this.spec.title;
    this.tableButton = iconButton("table", `${name}: values as a table`, () => this._toggleTable(), {
      "aria-pressed": "false",
    });
    this.wideButton = iconButton("wide", `${name}: large`, () => this.owner.onWide(this), { "aria-pressed": "false" });
    this.csv = h(
      "a",
      {
        class: "icon-button bare",
        title: `${name}: all values as CSV`,
        "aria-label": `${name}: all values as CSV`,
        download: "metrics.csv",
        href: "#",
      },
      icon("save"),
    );
    return [
      this.tableButton,
      this.csv,
      iconButton("image", `${name}: save as PNG`, () => this._save()),
      this.wideButton,
    ];
  }

  waiting() {
    this.drawn = false;
    fill(this.plot, skeleton(170));
  }

  setWide(wide) {
    this.el.classList.toggle("wide", wide);
    this.wideButton.setAttribute("aria-pressed", String(wide));
  }

  /** Says in place of the chart why there is none. */
  say(word, why, ...more) {
    this.drawn = false;
    this.lines = [];
    this._clear();
    this.plot.setAttribute("aria-label", `${this.spec.title}: ${word}. ${why ?? ""}`);
    fill(
      this.plot,
      h(
        "div",
        { class: "state" },
        h("p", { class: "unavailable" }, h("strong", {}, word)),
        why && h("p", { class: "muted small" }, why),
        ...more,
      ),
    );
    fill(this.now);
    fill(this.keys);
    this.tools.hidden = true;
    this.table.hidden = true;
  }

  _clear() {
    if (this.plot.listens) globalThis.Plotly?.purge(this.plot);
    this.plot.listens = false;
  }

  /** Shows lines; a chart that was drawn is changed in place. */
  async show(lines) {
    this.lines = lines;
    this.tools.hidden = false;
    const options = this.owner.options();
    this.plot.setAttribute(
      "aria-label",
      `${this.spec.title}, chart. ${lines.map((line) => describe(line, options.x)).join(" ")} ` +
        "Arrow keys move, plus and minus zoom, 0 shows all.",
    );
    this._legend();
    const range = options.x === "step" ? { from: options.from, to: options.to } : {};
    this.csv.href = address("/api/export.csv", {
      run: [...new Set(lines.map((line) => line.run))],
      metric: [...new Set(lines.map((line) => line.metric))],
      ...range,
    });
    if (!this.table.hidden) this._fillTable();
    if (!this.drawn) fill(this.plot);
    try {
      await draw(this.plot, lines, { ...options, marks: this.owner.marks?.() ?? [] }, this.owner.onRange);
      this.drawn = true;
    } catch (error) {
      this.plot.replaceChildren();
      fill(
        this.plot,
        h(
          "div",
          { class: "state" },
          h("p", {}, error.message),
          h("p", { class: "muted small" }, "The values are in the table."),
        ),
      );
      this.table.hidden = false;
      this._fillTable();
    }
  }

  _legend() {
    const one = this.lines.length === 1;
    const last = (line) => withUnit(line.y.at(-1), line.unit);
    fill(this.now, one && last(this.lines[0]));
    const single = one && !this.spec.named;
    fill(
      this.keys,
      !single &&
        this.lines.map((line) =>
          h(
            "li",
            {},
            h("span", {
              class: `swatch ${line.dash === "solid" ? "" : line.dash}`,
              vars: { "border-color": `var(--series-${line.slot})` },
            }),
            h("bdi", {}, visible(line.name)),
            !one && h("span", { class: "num" }, last(line)),
          ),
        ),
    );
  }

  _toggleTable() {
    this.table.hidden = !this.table.hidden;
    this.tableButton.setAttribute("aria-pressed", String(!this.table.hidden));
    if (!this.table.hidden) this._fillTable();
  }

  _fillTable() {
    const axis = this.owner.options().x;
    const head = h(
      "tr",
      {},
      h("th", { scope: "col" }, { step: "Step", time: "Time", relative: "Elapsed", tokens: "Tokens" }[axis]),
      this.lines.map((line) => h("th", { scope: "col", class: "right" }, visible(line.name))),
    );
    const rows = tableRows(this.lines).map(([x, ...values]) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, xWords(axis, x).replace(/^step /, "")),
        values.map((value, at) => h("td", { class: "right" }, withUnit(value, this.lines[at].unit))),
      ),
    );
    fill(
      this.table,
      h(
        "table",
        { class: "dense" },
        h("caption", { class: "sr-only" }, `${this.spec.title}: values; CSV has every one`),
        h("thead", {}, head),
        h("tbody", {}, rows),
      ),
    );
  }

  async _save() {
    try {
      download(await png(this.plot), `${this.spec.title.replaceAll(/[^\w.-]+/g, "_")}.png`);
    } catch {
      toast("The picture could not be made");
    }
  }

  _key(event) {
    if (event.target !== this.plot || event.ctrlKey || event.metaKey || event.altKey || !this.lines.length) return;
    const all = this.lines.flatMap((line) => (line.range?.length ? line.range : [line.x[0], line.x.at(-1)]));
    const [first, last] = [Math.min(...all), Math.max(...all)];
    const { from, to } = this.owner.options();
    const [low, high] = [from ?? first, to ?? last];
    const width = high - low;
    const moves = {
      ArrowLeft: [-0.2, -0.2],
      ArrowRight: [0.2, 0.2],
      "+": [0.2, -0.2],
      "=": [0.2, -0.2],
      "-": [-0.34, 0.34],
    };
    if (event.key === "0" || event.key === "Home") this.owner.onRange(null, null);
    else if (event.key in moves) {
      const [left, right] = moves[event.key];
      const [begin, end] = [low + left * width, high + right * width];
      const isAll = begin <= first && end >= last;
      if (!(end > begin) || end < first || begin > last) return;
      this.owner.onRange(isAll ? null : Math.max(first, begin), isAll ? null : end);
    } else return;
    event.preventDefault();
  }
}
