// Checks of the pages' modules that need no browser, run by test_front_logic.py: node front_logic.mjs STATIC

import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";
import { join } from "node:path";

const load = (name) => import(pathToFileURL(join(process.argv[2], name)).href);
globalThis.document = { addEventListener() {}, documentElement: { dataset: {} }, body: {} };
globalThis.matchMedia = () => ({ matches: false, addEventListener() {} });
globalThis.location = { hash: "" };
const { ago, bytes, date, duration, number, percent, short, title, visible, withUnit } = await load("format.js");
const views = await load("view.js");
const { address } = await load("api.js");
const { comparison, matching, sections } = await load("specs.js");
const { describe, tableRows } = await load("panel.js");
const { xScale } = await load("chart.js");
const { means } = await load("run.js");

const checks = {
  "what has no value is unavailable, never 0"() {
    for (const format of [ago, bytes, date, duration, number, percent, short])
      for (const none of [null, undefined, NaN, Infinity]) assert.equal(format(none, 1), "unavailable");
    assert.equal(withUnit(null, "bytes"), "unavailable");
    assert.equal(number(0), "0");
  },
  "figures are short"() {
    assert.deepEqual(
      [2.68414, 0.0003, 1.25e-7, 48120, 19.5, 2e15].map((one) => number(one)),
      ["2.684", "3e-4", "1.25e-7", "48,120", "19.50", "2e15"],
    );
    assert.deepEqual(
      [524288, 1.35e8, 1048576000, 12].map((one) => short(one)),
      ["524k", "135M", "1.05B", "12"],
    );
    assert.deepEqual([0.00051, 12.34, 200, 7500, 273600].map(duration), [
      "0.51 ms",
      "12.3 s",
      "3 min 20 s",
      "2 h 5 min",
      "3 d 4 h",
    ]);
    assert.equal(bytes(11 * 2 ** 30), "11 GiB");
    assert.equal(withUnit(0.2618, "share"), "26.2%");
  },
  "characters that hide or turn text are shown"() {
    assert.equal(visible("a\u202eb\u0007c\n\t\u009b"), "a[U+202E]b[U+0007]c\n\t[U+009B]");
    assert.equal(visible("<b>é 日本</b>"), "<b>é 日本</b>");
  },
  "a view is its address"() {
    const text = "#/run/0123456789abcdef/samples?x=time&smooth=0.6&from=10&to=20.5";
    assert.equal(views.format(views.parse(text)), text);
    assert.equal(
      views.format(views.parse("#/run/0123456789abcdef?x=step&smooth=0&log=0&from=")),
      "#/run/0123456789abcdef",
    );
    const many = views.parse("#/compare?run=a&run=b&run=c");
    assert.deepEqual(many.params.getAll("run"), ["a", "b", "c"]);
    assert.equal(views.format(many), "#/compare?run=a&run=b&run=c");
  },
  "an address that names nothing is missing"() {
    for (const text of ["#/run/../etc", "#/run/XYZ", "#/nothing", "#/run"])
      assert.equal(views.parse(text).page, "missing");
    assert.equal(views.parse("").page, "runs");
    assert.equal(views.parse("#/run/0123456789abcdef/nothing").tab, "overview");
  },
  "options of charts are checked"() {
    const of = (query) => views.chartOptions(new URLSearchParams(query));
    assert.deepEqual(of(""), { x: "step", from: null, to: null, smooth: 0, log: false, filter: "", wide: [] });
    const odd = of("x=evil&from=abc&to=1e3&smooth=7&log=1");
    assert.deepEqual([odd.x, odd.from, odd.to, odd.smooth, odd.log], ["step", null, 1000, 0.999, true]);
    assert.equal(of("smooth=-1").smooth, 0);
  },
  "parameters are quoted and empty ones are omitted"() {
    assert.equal(
      address("/api/series", { run: ["a", "b"], metric: "train/a&b=c", from: null, to: "" }),
      "/api/series?run=a&run=b&metric=train%2Fa%26b%3Dc",
    );
  },
  "standard charts stay where their metrics are missing, with the reason"() {
    const found = new Map(sections(["train/loss", "train/odd", "train/node_0/loss", "train/expert_load/3"]));
    const training = found.get("Training");
    assert.deepEqual(training.find((one) => one.title === "Loss").metrics, ["train/loss"]);
    const tpu = found.get("Hardware").find((one) => one.title === "TPU utilisation");
    assert.deepEqual(tpu.metrics, []);
    assert.match(tpu.absent, /TPU/);
    assert.deepEqual(
      found.get("Other metrics").flatMap((one) => one.metrics),
      ["train/odd"],
    );
  },
  "metrics are found by regular expressions"() {
    const specs = comparison(["train/loss", "eval/loss", "train/mfu"])[0][1];
    assert.deepEqual(
      matching(specs, views.expression("^eval/|mfu")).flatMap((one) => one.metrics),
      ["eval/loss", "train/mfu"],
    );
    assert.equal(matching(specs, null).length, 3);
    assert.throws(() => views.expression("("), SyntaxError);
  },
  "titles are words"() {
    assert.equal(title("train/grad_norm"), "Grad norm");
    assert.equal(title("system/host_memory_bytes"), "Host memory");
  },
  "a chart is a sentence as well"() {
    const line = { name: "training", unit: "", x: [1, 2, 3], y: [9, 2, 4], nonfinite: [2.5] };
    assert.equal(
      describe(line, "step"),
      "training: 9 at step 1, 4 at step 3; lowest 2 at step 2, highest 9 at step 1. Not finite at 1 points.",
    );
    assert.match(describe({ ...line, x: [], y: [] }, "step"), /no values/);
  },
  "a table has at most about a hundred rows, the first and the last point, and nearest earlier values"() {
    const x = Array.from({ length: 5000 }, (_, at) => at);
    const rows = tableRows([
      { x, y: x },
      { x: [100, 4000], y: [7, 8] },
    ]);
    assert.ok(rows.length <= 101);
    assert.deepEqual(rows[0], [0, 0, null]);
    assert.deepEqual(rows.at(-1), [4999, 4999, 8]);
  },
  "many points become few means"() {
    assert.deepEqual(means([1, 3, 5, 7, 9, 11], 3), [2, 6, 10]);
    assert.deepEqual(means([1, 2], 60), [1, 2]);
    assert.equal(
      means(
        Array.from({ length: 241 }, () => 4),
        60,
      ).length,
      60,
    );
  },
  "a range of an axis comes back as it went"() {
    for (const [axis, value] of [
      ["step", 1234],
      ["tokens", 1e9],
      ["relative", 7260],
      ["time", 1795763248.5],
    ]) {
      const scale = xScale(axis, 100_000);
      const there = scale.there(value);
      const drawn = axis === "time" ? new Date(there).toISOString().replace("T", " ").replace("Z", "") : there;
      assert.ok(Math.abs(scale.back(drawn) - value) < 1e-6, axis);
    }
  },
};

for (const [name, check] of Object.entries(checks)) {
  try {
    check();
    console.log(`ok ${name}`);
  } catch (error) {
    console.log(`not ok ${name}: ${error.message}`);
    process.exitCode = 1;
  }
}
