// Lines and heat maps, drawn by plotly.js of the installed package.

import { axisOf, date, duration, has, short } from "./format.js";
import { colour } from "./theme.js";

let library = null;

/** plotly.js, loaded when the first chart is seen: it is large. Rejects where it is not installed. */
export function plotly() {
  library ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/static/plotly.min.js";
    script.onload = () => resolve(globalThis.Plotly);
    script.onerror = () => {
      library = null;
      reject(new Error('plotly.min.js did not load: install the extra dashboard of capibara on the dashboard\'s machine'));
    };
    document.head.append(script);
  });
  return library;
}

const STEADY = new Set(["share", "tokens/s", "s", "bytes", "%"]);
const LEAST_SPAN = 0.16; // of the largest value
const COARSE = matchMedia("(pointer: coarse)");
const CONFIG = { displayModeBar: false, doubleClick: false, showTips: false, scrollZoom: false };
const ELAPSED = [
  [86_400, "d"],
  [3_600, "h"],
  [60, "min"],
  [1, "s"],
];

/** A name as plotly's text, in which tags would be markup of its own. */
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function font(size, name = "muted") {
  return { family: getComputedStyle(document.body).fontFamily, size, color: colour(name) };
}

/** How x values of an axis become plotly's, and back. */
export function xScale(axis, largest) {
  if (axis === "time") {
    const offset_ms = -60_000 * new Date().getTimezoneOffset();
    return {
      type: "date",
      there: (x) => 1000 * x + offset_ms,
      back: (x) => (new Date(`${String(x).replace(" ", "T")}Z`).getTime() - offset_ms) / 1000,
      suffix: "",
    };
  }
  if (axis === "relative") {
    const [unit_s, name] = ELAPSED.find(([one]) => largest >= 3 * one) ?? [1, "s"];
    return { type: "linear", there: (x) => x / unit_s, back: (x) => Number(x) * unit_s, suffix: ` ${name}` };
  }
  return { type: "linear", there: (x) => x, back: Number, suffix: "" };
}

function largestOf(lines, key) {
  let found = 0;
  for (const line of lines) for (const one of line[key] ?? []) if (Math.abs(one) > found) found = Math.abs(one);
  return found;
}

/**
 * The traces and the layout of a chart of lines.
 * @param {Array<{name: string, slot: number, dash: string, x: number[], y: number[], smooth: ?number[],
 *   nonfinite: number[], unit: string}>} lines
 * @param {{x: string, log: boolean, from: ?number, to: ?number, marks: Array}} options
 */
export function figure(lines, options) {
  const x = xScale(options.x, largestOf(lines, "x"));
  const unit = lines[0]?.unit ?? "";
  const y = axisOf(unit, largestOf(lines, "y"));
  const isTiny = unit === "" && largestOf(lines, "y") < 0.01;
  const isDense = lines.some((line) => line.x.length > 400);
  const traces = [];
  for (const line of lines) {
    const xs = line.x.map(x.there);
    const stroke = {
      color: colour(`series-${line.slot}`),
      width: isDense && !line.smooth ? 1.2 : 1.8,
      dash: line.dash,
      simplify: false,
    };
    const ys = (values) => values.map((one) => (one === null ? null : one / y.divisor));
    const few = line.x.length <= 24;
    const shared = {
      type: "scatter",
      x: xs,
      name: plain(line.name),
      line: stroke,
      connectgaps: false,
      hovertemplate: `%{y:.5~g}${y.suffix}`,
    };
    const dots = { mode: few ? "lines+markers" : "lines", marker: { size: 4.5, color: stroke.color } };
    if (line.smooth) {
      traces.push({
        ...shared,
        mode: "lines",
        y: ys(line.y),
        opacity: 0.24,
        line: { ...stroke, width: 1.1, dash: "solid" },
        hoverinfo: "skip",
        hovertemplate: null,
      });
      traces.push({ ...shared, ...dots, y: ys(line.smooth) });
    } else traces.push({ ...shared, ...dots, y: ys(line.y) });
    if (line.nonfinite?.length)
      traces.push({
        type: "scatter",
        mode: "markers",
        x: line.nonfinite.map(x.there),
        y: line.nonfinite.map(() => 0.035),
        yaxis: "y2",
        name: plain(line.name),
        hovertemplate: "not finite",
        marker: { symbol: "x", size: 6, color: colour("bad") },
      });
  }
  const ends = [options.from, options.to];
  const range = ends.some((one) => one !== null) ? rangeOf(lines, ends).map(x.there) : undefined;
  return {
    traces,
    layout: {
      ...base(),
      xaxis: xAxis(x, options.x, range),
      yaxis: {
        ...yAxis(y, options.log),
        ...(isTiny ? { exponentformat: "e", minexponent: 2 } : {}),
        ...calm(lines, y, unit, options.log),
      },
      ...secondAxis(),
      shapes: shapes(options.marks ?? [], x),
    },
  };
}

/** A range for values that hardly differ, of which the noise would fill the chart; none where they differ. */
function calm(lines, y, unit, isLog) {
  if (isLog || !STEADY.has(unit)) return {};
  let [low, high] = [Infinity, -Infinity];
  for (const line of lines) for (const one of line.y) [low, high] = [Math.min(low, one), Math.max(high, one)];
  const least = LEAST_SPAN * Math.abs(high);
  if (!(high >= low) || high - low >= least) return {};
  const middle = (low + high) / 2;
  const top = unit === "share" && high <= 1 ? Math.min(1.02, middle + least / 2) : middle + least / 2;
  return { autorange: false, range: [(top - least) / y.divisor, top / y.divisor] };
}

function rangeOf(lines, [from, to]) {
  const all = lines.flatMap((line) => [line.x[0], line.x.at(-1)]).filter(has);
  const low = from ?? Math.min(...all);
  const high = to ?? Math.max(...all);
  return high > low ? [low, high] : [low, low + 1];
}

function base() {
  return {
    autosize: true,
    margin: { l: 44, r: 10, t: 8, b: 26 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: font(11),
    showlegend: false,
    hovermode: "x unified",
    dragmode: COARSE.matches ? false : "zoom",
    hoverlabel: { bgcolor: colour("surface"), bordercolor: colour("line"), font: font(12, "ink"), namelength: 34 },
    selectionrevision: 0,
    uirevision: false,
  };
}

function xAxis(x, name, range) {
  const exponent = name === "tokens" || name === "step" ? { exponentformat: "B", separatethousands: true } : {};
  return {
    type: x.type,
    range,
    autorange: range === undefined,
    ...exponent,
    ticksuffix: x.suffix,
    nticks: 6,
    showgrid: false,
    zeroline: false,
    showline: true,
    linecolor: colour("line"),
    ticks: "outside",
    ticklen: 4,
    tickcolor: colour("line"),
    tickfont: font(11),
    spikemode: "across",
    spikethickness: 1,
    spikedash: "solid",
    spikecolor: colour("edge"),
    showspikes: true,
    fixedrange: COARSE.matches,
  };
}

function yAxis(y, log) {
  return {
    type: log ? "log" : "linear",
    nticks: 5,
    automargin: true,
    gridcolor: colour("grid"),
    gridwidth: 1,
    zeroline: false,
    ticksuffix: y.suffix,
    tickfont: font(11),
    ticks: "outside",
    ticklen: 6,
    tickcolor: "rgba(0,0,0,0)",
    exponentformat: "SI",
    minexponent: 4,
    fixedrange: true,
    ...(log ? { dtick: undefined } : {}),
  };
}

function secondAxis() {
  return { yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true } };
}

function shapes(marks, x) {
  const colours = { start: "edge", roll_back: "warn" };
  return marks.slice(-60).map((mark) => ({
    type: "line",
    xref: "x",
    yref: "paper",
    x0: x.there(mark.x),
    x1: x.there(mark.x),
    y0: 0,
    y1: 1,
    layer: "below",
    line: { width: 1, dash: "dot", color: colour(colours[mark.kind] ?? "edge") },
  }));
}

/** Draws lines into an element; calls `onRange(from, to)` when a range is chosen with the pointer. */
export async function draw(element, lines, options, onRange) {
  const Plotly = await plotly();
  if (!element.isConnected) return;
  const { traces, layout } = figure(lines, options);
  const scale = xScale(options.x, largestOf(lines, "x"));
  await Plotly.react(element, traces, layout, CONFIG);
  element.dataset.drawn = "true";
  element.zoomed = (change) => {
    const [low, high] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (low !== undefined && high !== undefined) onRange(scale.back(low), scale.back(high));
  };
  if (element.listens) return;
  element.listens = true;
  element.on("plotly_relayout", (change) => element.zoomed(change));
  element.on("plotly_doubleclick", () => onRange(null, null));
  follow(element, Plotly);
}

function follow(element, Plotly) {
  const observer = new ResizeObserver(() => {
    if (!element.isConnected) observer.disconnect();
    else if (element.clientWidth > 0) Plotly.Plots.resize(element);
  });
  observer.observe(element);
}

/** A heat map; `middle` is the value of the neutral colour. */
export async function heatMap(element, { x, y, z, xTitle, low, middle, high, name, discrete = null }) {
  const Plotly = await plotly();
  if (!element.isConnected) return;
  const at = (middle - low) / (high - low);
  const scale = discrete ?? [
    [0, colour("cold")],
    [Math.min(0.98, Math.max(0.02, at)), colour("even")],
    [1, colour("hot")],
  ];
  const trace = {
    type: "heatmap",
    x,
    y: y.map(plain),
    z,
    zmin: low,
    zmax: high,
    colorscale: scale,
    xgap: 0,
    ygap: 1.5,
    hoverongaps: false,
    showscale: discrete === null,
    hovertemplate: `%{y}<br>${xTitle} %{x:,}<br>${name} %{z:.3~g}<extra></extra>`,
    colorbar: {
      thickness: 9,
      outlinewidth: 0,
      tickfont: font(11),
      len: 1,
      x: 1.01,
      xpad: 4,
      nticks: 5,
      tickformat: ".2~f",
      ticksuffix: "×",
    },
  };
  const layout = {
    ...base(),
    hovermode: "closest",
    margin: { l: 30, r: discrete === null ? 10 : 10, t: 8, b: 40 },
    xaxis: {
      ...xAxis(xScale("step", 0), "step", undefined),
      showspikes: false,
      fixedrange: true,
      title: { text: xTitle, font: font(11), standoff: 6 },
    },
    yaxis: {
      type: "category",
      automargin: true,
      tickfont: font(11),
      fixedrange: true,
      showgrid: false,
      autorange: "reversed",
      ticks: "outside",
      ticklen: 6,
      tickcolor: "rgba(0,0,0,0)",
    },
  };
  await Plotly.react(element, [trace], layout, CONFIG);
  element.dataset.drawn = "true";
  if (!element.listens) {
    element.listens = true;
    follow(element, Plotly);
  }
}

/** A chart as a PNG at twice its size, as a data address. */
export async function png(element) {
  const Plotly = await plotly();
  const { traces, layout } = {
    traces: element.data,
    layout: { ...element.layout, paper_bgcolor: colour("surface"), showlegend: element.data.length > 1 },
  };
  return Plotly.toImage(
    { data: traces, layout },
    { format: "png", width: Math.max(760, element.clientWidth), height: Math.max(420, element.clientHeight), scale: 2 },
  );
}

/** An x value in words. */
export function xWords(axis, value) {
  if (axis === "time") return date(value);
  if (axis === "relative") return duration(value);
  return axis === "tokens" ? `${short(value)} tokens` : `step ${Math.round(value).toLocaleString("en")}`;
}
