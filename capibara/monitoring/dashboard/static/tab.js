// What tabs of a run that are loaded as one answer have in common.

import { get, isAbort } from "./api.js";
import { fill, h, skeleton, state } from "./dom.js";
import { visible } from "./format.js";

const RENEW_MS = 2_000;

/**
 * Loads `path` of a run into `root` by `draw(answer)`, again when lines of the kinds arrive (at most every 2 s).
 * @param {string[]} kinds none: loaded once
 */
export function loaded(root, page, path, draw, kinds = [], query = {}) {
  fill(root, h("div", { class: "card pad" }, skeleton(220)));
  let last = 0;
  let isThere = false;
  const load = async () => {
    last = Date.now();
    let answer;
    try {
      answer = await get(`/api/runs/${page.id}/${path}`, query, page.signal);
    } catch (error) {
      if (isAbort(error) || isThere) return;
      fill(
        root,
        h(
          "div",
          { class: "card" },
          state(
            "warn",
            "This could not be loaded",
            error.message,
            h("button", { type: "button", class: "button", onclick: load }, "Try again"),
          ),
        ),
      );
      return;
    }
    isThere = true;
    if (answer.unavailable && !draw.takesUnavailable)
      fill(root, h("div", { class: "card" }, state("folder", "unavailable", visible(answer.unavailable))));
    else draw(answer);
  };
  load();
  page.onChange((found) => {
    if (found === null || (found.some((kind) => kinds.includes(kind)) && Date.now() - last > RENEW_MS)) load();
  });
}
