// Texts that the model wrote during training, newest first.

import { get, isAbort } from "./api.js";
import { fill, h, skeleton, state, toast } from "./dom.js";
import { visible, whole } from "./format.js";
import { moment } from "./parts.js";
import * as views from "./view.js";

const PAGE = 20;

export function show(root, page) {
  const list = h("div", { class: "card" }, skeleton(260));
  const more = h("p", { class: "foot" });
  const choose = h("select", {
    "aria-label": "Prompt",
    onchange: () => {
      views.change({ prompt: choose.value });
      load();
    },
  });
  let shown = [];
  const prompt = () => views.current().params.get("prompt");
  const ask = (before = null) =>
    get(`/api/runs/${page.id}/samples`, { prompt: prompt(), before, limit: PAGE }, page.signal);

  const load = async () => {
    let answer;
    try {
      answer = await ask();
    } catch (error) {
      if (!isAbort(error) && !shown.length)
        fill(
          list,
          state(
            "warn",
            "The samples could not be loaded",
            error.message,
            h("button", { type: "button", class: "button", onclick: load }, "Try again"),
          ),
        );
      return;
    }
    shown = answer.samples;
    const options = [["", "all prompts"], ...answer.prompts.map((text) => [text, text])];
    fill(
      choose,
      options.map(([value, text]) =>
        h("option", { value, selected: value === (prompt() ?? "") }, visible(text).slice(0, 80)),
      ),
    );
    draw(answer.more);
  };
  const older = async () => {
    try {
      const answer = await ask(shown.at(-1).step);
      shown = [...shown, ...answer.samples];
      draw(answer.more);
    } catch (error) {
      if (!isAbort(error)) toast(`Not loaded: ${error.message}`);
    }
  };
  const draw = (hasMore) => {
    fill(
      list,
      shown.length
        ? shown.map((sample) => one(sample, page.live.now()))
        : state("folder", "No samples yet", "A run writes samples where Trainer.sample_every is set."),
    );
    fill(more, hasMore && h("button", { type: "button", class: "button", onclick: older }, "Older samples"));
  };

  root.append(
    h("div", { class: "filters" }, h("label", { class: "group" }, h("span", { class: "sr-only" }, "Prompt"), choose)),
    list,
    more,
  );
  load();
  // Those who read older ones keep them.
  page.onChange((kinds) => {
    if (kinds === null || (kinds.includes("sample") && shown.length <= PAGE)) load();
  });
}

function one(sample, now_s) {
  return h(
    "article",
    { class: "sample", "aria-label": `Sample of step ${whole(sample.step)}` },
    h("header", {}, h("strong", { class: "num" }, `Step ${whole(sample.step)}`), moment(sample.time, now_s)),
    h(
      "pre",
      { dir: "auto" },
      h("span", { class: "prompt" }, visible(sample.prompt)),
      visible(sample.text),
      sample.cut && h("span", { class: "muted" }, " … (cut)"),
    ),
  );
}
