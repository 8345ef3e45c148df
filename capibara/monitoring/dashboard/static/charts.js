// Sections of panels under a bar of controls, for one run or for several.

import { controls } from "./controls.js";
import { fill, h, state } from "./dom.js";
import { matching } from "./specs.js";
import * as views from "./view.js";

/**
 * Puts sections of charts into `root`.
 * @param {() => Array<[string, Array]>} sections names and specs; the one named "Other metrics" is closed at first
 * @param {(name: string) => ?Node} extra what else belongs to a section
 */
export function chartSections(root, board, sections, extra = () => null) {
  const body = h("div", {});
  const draw = () => {
    board.clear();
    let expression = null;
    try {
      expression = views.expression(board.options().filter);
    } catch {
      // of an old link: as if there were none
    }
    const shown = sections()
      .map(([name, specs]) => [name, matching(specs, expression)])
      .filter(([, specs]) => specs.length);
    fill(
      body,
      shown.length
        ? shown.map(([name, specs]) => section(board, name, specs, expression !== null, extra(name)))
        : state("search", "No metric matches", "Search by another regular expression, such as loss|accuracy."),
    );
  };
  const bar = controls(board, { onFilter: draw });
  board.changed = bar.sync;
  root.append(bar.el, body);
  draw();
  return { redraw: draw };
}

function section(board, name, specs, isSearch, extra) {
  const grid = h("div", { class: "grid" });
  const fillGrid = () => grid.childElementCount || grid.append(...specs.map((spec) => board.add(spec).el));
  if (name === "Other metrics" && !isSearch) {
    return h(
      "details",
      { class: "section", ontoggle: fillGrid },
      h("summary", {}, h("h2", {}, name), " ", h("span", { class: "muted num" }, String(specs.length))),
      grid,
    );
  }
  fillGrid();
  if (extra && !isSearch) grid.append(extra);
  return h("section", { class: "section" }, h("header", {}, h("h2", {}, name)), grid);
}
