// Small pieces that several pages show.

import { fill, h, spark } from "./dom.js";
import { ago, date, duration, has, NONE, number, percent, short, STATUS, visible, whole } from "./format.js";

export function statusPill(status) {
  const [tone, words] = STATUS[status] ?? ["", visible(status)];
  return h("span", { class: `pill ${tone}` }, words);
}

/** A moment: how long ago, and the date as its tooltip. */
export function moment(time_s, now_s) {
  if (!has(time_s)) return h("span", { class: "unavailable" }, NONE);
  return h(
    "time",
    { datetime: new Date(1000 * time_s).toISOString(), title: date(time_s), class: "moment", "data-time": time_s },
    ago(time_s, now_s),
  );
}

/** Renews all moments of the page. */
export function renewMoments(now_s) {
  for (const one of document.querySelectorAll("time.moment")) {
    const text = ago(Number(one.dataset.time), now_s);
    if (one.textContent !== text) one.textContent = text;
  }
}

export function bdi(text) {
  return h("bdi", {}, visible(text));
}

/** A cell of a table; without a value it says so. */
export function cell(text, attrs = {}) {
  return h(
    "td",
    { ...attrs, class: `${attrs.class ?? ""} ${text === NONE ? "unavailable" : ""}`.trim() || null },
    text,
  );
}

export function progressShare(run) {
  return has(run.step) && has(run.total_steps) && run.total_steps > 0 ? Math.min(1, run.step / run.total_steps) : null;
}

/** One figure at the top of a run. */
export class Figure {
  constructor(name) {
    this.value = h("dd", { class: "value" });
    this.about = h("dd", { class: "about" });
    this.line = h("dd", { "aria-hidden": "true" });
    this.el = h("div", { class: "card figure" }, h("dt", {}, name), this.value, this.about, this.line);
    this.name = name;
  }

  show(text, unit = "", about = "", values = null) {
    this.value.classList.toggle("unavailable", text === NONE);
    fill(this.value, text, text !== NONE && unit && h("small", {}, unit));
    fill(this.about, about || "\u00a0");
    this.about.title = about;
    if (has(values)) fill(this.line, h("div", { class: "meter" }, h("span", { vars: { width: `${100 * values}%` } })));
    else if (values) fill(this.line, spark(values, ""));
  }
}

/** The figures of a run: {name, text, unit, about}. */
export function figuresOf(run) {
  const steps = has(run.step_s) ? `${duration(run.step_s)} a step` : "";
  return [
    {
      name: "Loss",
      metric: "train/loss",
      text: number(run.loss),
      unit: "",
      about: has(run.eval_loss) ? `evaluation ${number(run.eval_loss)}` : "training, nats per token",
    },
    { name: "Perplexity", metric: "eval/perplexity", text: number(run.perplexity), unit: "", about: "evaluation" },
    { name: "Tokens per second", metric: "train/tokens_per_s", text: short(run.tokens_per_s), unit: "", about: steps },
    {
      name: "MFU",
      metric: "train/mfu",
      text: percent(run.mfu),
      unit: "",
      about: run.device_kind ? `of ${run.device_count ?? "?"} × ${visible(run.device_kind)}` : "",
    },
    {
      name: "Goodput",
      metric: null,
      text: percent(run.goodput),
      unit: "",
      about: run.starts > 1 ? `${whole(run.starts)} starts` : "productive share of the time",
    },
    {
      name: "Gradient norm",
      metric: "train/grad_norm",
      text: number(run.grad_norm),
      unit: "",
      about: has(run.learning_rate) ? `learning rate ${number(run.learning_rate, 3)}` : "",
    },
  ];
}

/** The colour of each part of a run's time; above 8 they begin again, striped. */
const PART_SLOTS = {
  productive: 3,
  lost: 2,
  down: 4,
  "data wait": 5,
  save: 6,
  "set up": 1,
  start: 7,
  other: 8,
  rollout: 9,
  evaluate: 13,
  restore: 12,
  reference: 14,
};

/** Where the time of a run went, as a bar and as a list. */
export function goodputCard(answer) {
  const head = h(
    "div",
    { class: "panel-head" },
    h(
      "div",
      { class: "titles" },
      h("h3", {}, "Goodput, and where the rest went"),
      has(answer?.goodput) && h("span", { class: "now" }, `${percent(answer.goodput)} productive`),
      has(answer?.total_s) && h("span", { class: "muted small" }, `of ${duration(answer.total_s)}`),
    ),
  );
  if (!answer || answer.unavailable || !answer.parts?.length) {
    return h(
      "figure",
      { class: "card panel wide pad" },
      head,
      h(
        "p",
        { class: "unavailable" },
        `${NONE}: ${answer?.unavailable ? visible(answer.unavailable) : "no time was recorded yet"}`,
      ),
    );
  }
  const slot = (name) => PART_SLOTS[name] ?? 8;
  const look = (name, more) => ({
    class: [more, slot(name) > 8 && "striped"].filter(Boolean).join(" "),
    vars: { "background-color": `var(--series-${((slot(name) - 1) % 8) + 1})` },
  });
  const words = answer.parts.map((part) => `${part.name} ${percent(part.share)}`).join(", ");
  return h(
    "figure",
    { class: "card panel wide pad" },
    head,
    h(
      "div",
      { class: "stack", role: "img", "aria-label": `Where the time went: ${words}` },
      answer.parts.map((part) =>
        h("span", {
          title: `${part.name}: ${percent(part.share)}`,
          class: look(part.name).class,
          vars: { "flex-grow": String(Math.max(part.share, 0.001)), ...look(part.name).vars },
        }),
      ),
    ),
    h(
      "ul",
      { class: "parts" },
      answer.parts.map((part) =>
        h(
          "li",
          {},
          h("span", look(part.name, "swatch block")),
          h("span", {}, visible(part.name)),
          h("span", { class: "num" }, percent(part.share), h("small", {}, duration(part.seconds))),
        ),
      ),
    ),
  );
}

/** A table in a card; `columns` are [title, isNumber]. */
export function tableCard(label, columns, rows, attrs = {}) {
  return h(
    "div",
    { class: "card" },
    h(
      "div",
      { class: "table-box", tabindex: "0", role: "region", "aria-label": label },
      h(
        "table",
        attrs,
        h("caption", { class: "sr-only" }, label),
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            columns.map(([text, isNumber]) => h("th", { scope: "col", class: isNumber ? "right" : null }, text)),
          ),
        ),
        h("tbody", {}, rows),
      ),
    ),
  );
}

/** A definition list of figures that change together. */
export function tiles(pairs) {
  return h(
    "dl",
    { class: "tiles" },
    pairs.map(([name, text]) =>
      h(
        "div",
        { class: "card tile" },
        h("dt", {}, name),
        h("dd", { class: text === NONE ? "unavailable" : null }, text),
      ),
    ),
  );
}
