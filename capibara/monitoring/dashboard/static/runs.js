// The list of runs: search, sort, choose some to compare.

import { get, isAbort } from "./api.js";
import { fill, h, icon, searchBox, skeleton, spark, state } from "./dom.js";
import { has, number, percent, short, visible, whole } from "./format.js";
import { bdi, cell, moment, progressShare, statusPill } from "./parts.js";
import * as views from "./view.js";

const PAGE = 100;
const SORTS = [
  ["updated", "newest first"],
  ["name", "by name"],
  ["step", "most steps first"],
  ["loss", "lowest loss first"],
];
const WITHIN = [
  ["name", "in names"],
  ["config", "in configurations"],
  ["any", "in both"],
];
const MOST_COMPARED = 20;

export function show(root, { live, signal, setTitle }) {
  new RunsPage(root, live, signal, setTitle).begin();
}

class RunsPage {
  constructor(root, live, signal, setTitle) {
    Object.assign(this, { root, live, signal, setTitle, limit: PAGE, timer: 0, answer: null });
    this.chosen = new Set(views.current().params.getAll("run"));
    this.list = h("div", { class: "card" }, skeleton(320));
    this.about = h("p", { role: "status" }, "\u00a0");
    this.tray = h("div", {});
    this.more = h("div", {});
  }

  begin() {
    this.setTitle("Runs");
    const { params } = views.current();
    const option =
      (chosen) =>
      ([value, text]) =>
        h("option", { value, selected: value === chosen }, text);
    const changed = (name) => (event) => {
      views.change({ [name]: event.target.value });
      this.load();
    };
    fill(
      this.root,
      h("div", { class: "page-head" }, h("div", { class: "grow" }, h("h1", {}, "Runs"), this.about)),
      h(
        "div",
        { class: "filters", role: "search" },
        searchBox(
          "Search runs by regular expression",
          "Search: regular expression",
          params.get("search") ?? "",
          (text, input) => {
            this.input = input;
            views.change({ search: text });
            this.load();
          },
        ),
        h(
          "select",
          { "aria-label": "Where to search", onchange: changed("within") },
          WITHIN.map(option(params.get("within") ?? "name")),
        ),
        h(
          "select",
          { "aria-label": "Order", onchange: changed("sort") },
          SORTS.map(option(params.get("sort") ?? "updated")),
        ),
      ),
      this.list,
      this.more,
      this.tray,
    );
    const on = (name, react) => this.live.addEventListener(name, react, { signal: this.signal });
    on("update", () => this.later());
    for (const name of ["runs", "reload", "resync", "alert"]) on(name, () => this.later());
    this.load();
  }

  later() {
    this.timer ||= setTimeout(() => {
      this.timer = 0;
      if (!document.hidden) this.load();
    }, 1000);
  }

  async load() {
    const { params } = views.current();
    const query = {
      search: params.get("search"),
      within: params.get("within"),
      sort: params.get("sort"),
      limit: this.limit,
    };
    try {
      this.answer = await get("/api/runs", query, this.signal);
      this.input?.setAttribute("aria-invalid", "false");
      this.draw();
    } catch (error) {
      if (isAbort(error)) return;
      if (error.code === "bad_search") {
        this.input?.setAttribute("aria-invalid", "true");
        fill(this.about, h("span", { class: "field-error" }, error.message));
      } else if (!this.answer) {
        fill(
          this.list,
          state(
            "warn",
            "The runs could not be loaded",
            error.message,
            h("button", { type: "button", class: "button", onclick: () => this.load() }, "Try again"),
          ),
        );
      }
    }
  }

  draw() {
    const { runs, matched, total } = this.answer;
    const going = runs.filter((run) => run.status === "running").length;
    const text =
      matched === total
        ? `${whole(total)} ${total === 1 ? "run" : "runs"}, ${going} running`
        : `${whole(matched)} of ${whole(total)} runs match`;
    if (this.about.textContent !== text) this.about.textContent = text;
    if (!total)
      fill(
        this.list,
        state(
          "folder",
          "No runs yet",
          "A run appears here as soon as it writes its first line of metrics.",
          h("p", {}, h("code", {}, "make quickstart")),
        ),
      );
    else if (!runs.length)
      fill(this.list, state("search", "No run matches", "Search by another regular expression, or in configurations."));
    else this.drawTable(runs);
    fill(
      this.more,
      matched > runs.length &&
        h(
          "p",
          { class: "foot" },
          h(
            "button",
            {
              type: "button",
              class: "button",
              onclick: () => {
                this.limit += 4 * PAGE;
                this.load();
              },
            },
            `Show more: ${whole(matched - runs.length)}`,
          ),
        ),
    );
    this.drawTray();
  }

  /** Rows stay the same elements while their runs do: what has the focus keeps it. */
  drawTable(runs) {
    if (!this.body?.isConnected) fill(this.list, this.table());
    const rows = runs.map((run) => {
      const fresh = this.row(run);
      const kept = this.rows.get(run.id);
      if (!kept) return fresh;
      kept.className = fresh.className;
      const [isSame, box] = [kept.cells[1].textContent === fresh.cells[1].textContent, kept.querySelector("input")];
      box.checked = this.chosen.has(run.id);
      [...fresh.cells].forEach((cell_, at) => {
        if (at === 0 || (at === 1 && isSame)) return;
        if (at === 3 || at === 4 || kept.cells[at].textContent !== cell_.textContent) kept.cells[at].replaceWith(cell_);
      });
      return kept;
    });
    this.rows = new Map(runs.map((run, at) => [run.id, rows[at]]));
    const isInOrder = rows.length === this.body.rows.length && rows.every((row, at) => this.body.rows[at] === row);
    if (!isInOrder) fill(this.body, rows);
  }

  table() {
    this.body = h("tbody", {});
    this.rows = new Map();
    const columns = [
      ["Status"],
      ["Loss over time", false, "curve"],
      ["Steps"],
      ["Loss", true],
      ["Eval loss", true],
      ["Perplexity", true, "minor"],
      ["Tokens/s", true],
      ["MFU", true],
      ["Goodput", true],
      ["Updated", true],
    ];
    const head = h(
      "tr",
      {},
      h("td", {}, h("span", { class: "sr-only" }, "Compare")),
      h("th", { scope: "col" }, "Run"),
      columns.map(([text, isNumber, more]) =>
        h("th", { scope: "col", class: [isNumber && "right", more].filter(Boolean).join(" ") || null }, text),
      ),
    );
    return h(
      "div",
      { class: "table-box", tabindex: "0", role: "region", "aria-label": "Runs" },
      h("table", { class: "runs" }, h("thead", {}, head), this.body),
    );
  }

  row(run) {
    const isChosen = this.chosen.has(run.id);
    const box = h("input", {
      type: "checkbox",
      checked: isChosen,
      "aria-label": `Compare ${visible(run.name)}`,
      onchange: () => this.choose(run.id, box.checked),
    });
    const at = run.name.lastIndexOf("/") + 1;
    const figure = (label, text, more = "") => cell(text, { class: `right fig ${more}`.trim(), "data-label": label });
    const isLoading = run.loading && `reading ${percent(run.share_read, 0)}`;
    return h(
      "tr",
      { class: isChosen ? "chosen" : null },
      h("td", { class: "pick" }, box),
      h(
        "th",
        { scope: "row", class: "name" },
        h(
          "a",
          { href: views.to("run", { id: run.id }) },
          at > 0 && h("span", { class: "folder" }, bdi(run.name.slice(0, at))),
          bdi(run.name.slice(at)),
        ),
        run.alerts > 0 &&
          h(
            "span",
            {},
            " ",
            h(
              "span",
              { class: "count", title: "active alerts" },
              String(run.alerts),
              h("span", { class: "sr-only" }, " active alerts"),
            ),
          ),
      ),
      h("td", { class: "status" }, statusPill(run.status)),
      h("td", { class: "curve" }, spark(run.spark, `Loss of ${visible(run.name)} over time`)),
      this.steps(run, isLoading),
      figure("Loss", number(run.loss), "left-one"),
      figure("Eval loss", number(run.eval_loss)),
      figure("Perplexity", number(run.perplexity), "minor"),
      figure("Tokens/s", short(run.tokens_per_s), "left-one"),
      figure("MFU", percent(run.mfu)),
      figure("Goodput", percent(run.goodput), "left-one"),
      h("td", { class: "right seen", "data-label": "Updated" }, moment(run.updated, this.live.now())),
    );
  }

  steps(run, isLoading) {
    const share = progressShare(run);
    return h(
      "td",
      { class: "step" },
      h(
        "span",
        { class: "num" },
        isLoading || (has(run.total_steps) ? `${whole(run.step)} of ${whole(run.total_steps)}` : whole(run.step)),
      ),
      share !== null && h("div", { class: "track" }, h("span", { vars: { width: `${100 * share}%` } })),
    );
  }

  choose(id, isChosen) {
    if (isChosen) this.chosen.add(id);
    else this.chosen.delete(id);
    views.change({ run: [...this.chosen] });
    this.draw();
  }

  drawTray() {
    const many = this.chosen.size;
    if (!many) return fill(this.tray);
    const href = views.to("compare", { params: { run: [...this.chosen] } });
    const tooMany = many > MOST_COMPARED;
    return fill(
      this.tray,
      h(
        "div",
        { class: "tray", role: "region", "aria-label": "Chosen runs" },
        h("strong", { class: "num" }, `${many} chosen`),
        tooMany && h("span", { class: "field-error" }, `at most ${MOST_COMPARED}`),
        h(
          "button",
          {
            type: "button",
            class: "button quiet",
            onclick: () => {
              this.chosen.clear();
              views.change({ run: null });
              this.draw();
            },
          },
          "Clear",
        ),
        many < 2
          ? h("span", { class: "muted small" }, "choose one more to compare")
          : !tooMany && h("a", { class: "button primary", href }, icon("check"), `Compare ${many} runs`),
      ),
    );
  }
}
