// What applies to all charts of a page: axis, smoothing, scale, range, search, link.

import { h, icon, searchBox, segments, toast } from "./dom.js";
import * as views from "./view.js";

let bars = 0;

/**
 * The bar of controls.
 * @param {import("./board.js").Board} board
 * @param {{onFilter: Function}} on
 * @returns {{el: HTMLElement, sync: Function}} sync shows a range that was chosen elsewhere
 */
export function controls(board, { onFilter }) {
  const now = board.options();
  const id = `controls-${(bars += 1)}`;
  const from = rangeInput("First");
  const to = rangeInput("Last");
  const reset = h(
    "button",
    { type: "button", class: "button quiet", onclick: () => board.setRange(null, null) },
    "All",
  );
  const sync = () => {
    const { from: low, to: high, x } = board.options();
    const isTime = x === "time";
    from.value = low === null || isTime ? "" : String(low);
    to.value = high === null || isTime ? "" : String(high);
    from.disabled = to.disabled = isTime;
    from.title = to.title = isTime ? "Zoom in a chart instead" : `In units of the axis: ${unitOf(x)}`;
    reset.disabled = low === null && high === null;
  };
  const typed = () => {
    const value = (input) =>
      input.value.trim() === "" || !Number.isFinite(Number(input.value)) ? null : Number(input.value);
    board.setRange(value(from), value(to));
  };
  for (const input of [from, to]) input.addEventListener("change", typed);
  const axis = segments("axis", "Horizontal axis", views.AXES, now.x, (value) => {
    views.change({ x: value, from: null, to: null });
    sync();
    board.reload();
  });
  const more = h(
    "div",
    { class: "more", id },
    h("div", { class: "group" }, axis),
    smoothing(board, now.smooth),
    logSwitch(board, now.log),
    h(
      "div",
      { class: "group range", role: "group", "aria-label": "Range" },
      from,
      h("span", { class: "muted", "aria-hidden": "true" }, "to"),
      to,
      reset,
    ),
  );
  const toggle = h(
    "button",
    {
      type: "button",
      class: "button more-toggle",
      "aria-expanded": "false",
      "aria-controls": id,
      onclick: () => {
        toggle.setAttribute("aria-expanded", String(bar.classList.toggle("open")));
      },
    },
    icon("tune"),
    "View",
  );
  const link = h(
    "button",
    {
      type: "button",
      class: "icon-button",
      "aria-label": "Copy the link of this view",
      title: "Copy the link of this view",
      onclick: copyLink,
    },
    icon("link"),
  );
  const bar = h(
    "div",
    { class: "controls", role: "region", "aria-label": "How charts are shown" },
    more,
    filter(now.filter, onFilter),
    toggle,
    link,
  );
  sync();
  return { el: bar, sync };
}

function unitOf(x) {
  return { step: "steps", relative: "seconds since the first start", tokens: "tokens", time: "time" }[x];
}

function rangeInput(name) {
  return h("input", {
    type: "text",
    inputmode: "decimal",
    "aria-label": `${name} value of the range`,
    placeholder: name.toLowerCase(),
    autocomplete: "off",
  });
}

function smoothing(board, value) {
  const output = h("output", {}, words(value));
  let timer = 0;
  // The weights that matter are close to 1: the slider is even in the width of the average.
  const input = h("input", {
    type: "range",
    min: 0,
    max: 30,
    step: 1,
    value: String(Math.round(-10 * Math.log10(1 - value))),
    "aria-valuetext": words(value),
    oninput: () => {
      const weight = Number((1 - 10 ** (-Number(input.value) / 10)).toFixed(3));
      output.textContent = words(weight);
      input.setAttribute("aria-valuetext", words(weight));
      clearTimeout(timer);
      timer = setTimeout(() => {
        views.change({ smooth: weight });
        board.reload();
      }, 180);
    },
  });
  return h("label", { class: "group" }, h("span", { class: "label" }, "Smooth"), input, output);
}

function words(weight) {
  return weight === 0 ? "off" : String(weight);
}

function logSwitch(board, isLog) {
  const input = h("input", {
    type: "checkbox",
    checked: isLog,
    onchange: () => {
      views.change({ log: input.checked ? 1 : 0 });
      board.redraw();
    },
  });
  return h("label", { class: "switch" }, input, "Log scale");
}

function filter(value, onFilter) {
  return searchBox("Search metrics by regular expression", "Metrics: loss|mfu", value, (text, input) => {
    try {
      views.expression(text);
      input.setAttribute("aria-invalid", "false");
      input.title = "";
    } catch (error) {
      input.setAttribute("aria-invalid", "true");
      input.title = error.message;
      toast(`Not a regular expression: ${error.message}`);
      return;
    }
    views.change({ metric: text });
    onFilter(text);
  });
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    toast("Link copied: it opens this view");
  } catch {
    toast("The browser keeps its clipboard: copy the address instead");
  }
}
