// Figures as people read them. Where there is no value the word is "unavailable", never 0.

export const NONE = "unavailable";
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

export function has(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** A run's text with what cannot be seen made visible: control characters, and marks that turn the order of letters. */
export function visible(text) {
  return String(text).replace(UNSEEN, (one) => `[U+${one.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}]`);
}

/** Three or four digits: 2.684, 0.0003, 1.2e-7, 48,120. */
export function number(value, digits = 4) {
  if (!has(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e12 || size < 1e-3)
    return value
      .toExponential(Math.max(0, digits - 2))
      .replace("e+", "e")
      .replace(/\.?0+e/, "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en", {
    maximumFractionDigits: Math.min(6, places),
    minimumFractionDigits: size >= 1 ? Math.min(3, places) : 0,
  });
}

export function whole(value) {
  return has(value) ? Math.round(value).toLocaleString("en") : NONE;
}

/** 1.2 M, 3.4 B: counts of tokens and parameters. */
export function short(value, digits = 3) {
  if (!has(value)) return NONE;
  const [divisor, unit] = [
    [1e12, "T"],
    [1e9, "B"],
    [1e6, "M"],
    [1e3, "k"],
  ].find(([one]) => Math.abs(value) >= one) ?? [1, ""];
  return `${Number((value / divisor).toPrecision(digits)).toLocaleString("en")}${unit}`;
}

export function bytes(value) {
  if (!has(value)) return NONE;
  const [divisor, unit] = [
    [2 ** 40, "TiB"],
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ].find(([one]) => Math.abs(value) >= one) ?? [1, "B"];
  return `${Number((value / divisor).toPrecision(3)).toLocaleString("en")} ${unit}`;
}

export function percent(value, digits = 1) {
  return has(value) ? `${(100 * value).toFixed(digits)}%` : NONE;
}

/** 850 ms, 12 s, 3 min 20 s, 2 h 5 min, 3 d 4 h. */
export function duration(seconds) {
  if (!has(seconds)) return NONE;
  const size = Math.abs(seconds);
  if (size < 1) return `${Number((1000 * seconds).toPrecision(3))} ms`;
  if (size < 60) return `${Number(seconds.toPrecision(3))} s`;
  const units = [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
    ["s", 1],
  ];
  const at = units.findIndex(([, one]) => size >= one);
  const [name, one] = units[at];
  const [below, small] = units[at + 1];
  const rest = Math.floor((size % one) / small);
  return `${Math.floor(size / one)} ${name}${rest ? ` ${rest} ${below}` : ""}`;
}

export function ago(time_s, now_s) {
  if (!has(time_s)) return NONE;
  const age = Math.max(0, now_s - time_s);
  return age < 5
    ? "just now"
    : `${duration(age < 60 ? Math.round(age) : age).replace(/ (\d+) (s|min|h)$/, age < 7200 ? " $1 $2" : "")} ago`;
}

export function date(time_s) {
  if (!has(time_s)) return NONE;
  return new Date(1000 * time_s).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}

/** A value in the unit that the server names. */
export function withUnit(value, unit) {
  if (!has(value)) return NONE;
  if (unit === "bytes") return bytes(value);
  if (unit === "share") return percent(value);
  if (unit === "%") return `${number(value, 3)}%`;
  if (unit === "s") return duration(value);
  if (unit === "tokens/s") return `${short(value)} tokens/s`;
  return number(value);
}

/** How an axis shows a unit: values are divided; the suffix follows each tick. */
export function axisOf(unit, largest) {
  if (unit === "bytes") {
    const [divisor, name] = [
      [2 ** 40, "TiB"],
      [2 ** 30, "GiB"],
      [2 ** 20, "MiB"],
    ].find(([one]) => largest >= one) ?? [2 ** 10, "KiB"];
    return { divisor, suffix: ` ${name}`, format: "" };
  }
  if (unit === "share") return { divisor: 0.01, suffix: "%", format: "" };
  if (unit === "%") return { divisor: 1, suffix: "%", format: "" };
  if (unit === "s") return { divisor: 1, suffix: " s", format: "" };
  return { divisor: 1, suffix: "", format: "" };
}

const WORDS = {
  mfu: "MFU",
  hfu: "HFU",
  cpu: "CPU",
  cpus: "CPUs",
  s: "(s)",
  tpu: "TPU",
  kl: "KL",
  p50: "median",
  p90: "90th percentile",
  p99: "99th percentile",
};
/** train/grad_norm -> Grad norm. */
export function title(metric) {
  const name = metric.slice(metric.indexOf("/") + 1);
  const words = name
    .replaceAll("/", " · ")
    .replace(/_(percent|bytes)$/, "")
    .replaceAll("_per_s", " per second")
    .split(/[_ ]/)
    .map((word) => WORDS[word] ?? word);
  const text = words.join(" ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export const STATUS = {
  running: ["good", "running"],
  finished: ["info", "finished"],
  stopped_early: ["info", "stopped early"],
  interrupted: ["warn", "interrupted"],
  waiting: ["", "waiting"],
  stalled: ["bad", "stalled"],
  failed: ["bad", "failed"],
};
