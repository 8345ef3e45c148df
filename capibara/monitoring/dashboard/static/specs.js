// Which charts a run has, in which order, and why one may be unavailable.

import { title } from "./format.js";

const TPU_ONLY = "libtpu reports it on TPUs only.";
const STANDARD = [
  [
    "Training",
    [
      { title: "Loss", metrics: ["train/loss", "eval/loss"], absent: "The run has logged no loss yet." },
      {
        title: "Perplexity",
        metrics: ["eval/perplexity", "train/perplexity"],
        absent: "The run has not been evaluated: see Trainer.eval_every.",
      },
      { title: "Gradient norm", metrics: ["train/grad_norm"], absent: "The run has logged none." },
      { title: "Learning rate", metrics: ["train/learning_rate"], absent: "The run has logged none." },
      { title: "Token accuracy", metrics: ["train/token_accuracy", "eval/token_accuracy"], optional: true },
      { title: "Bits per byte", metrics: ["eval/bits_per_byte"], optional: true },
    ],
  ],
  [
    "Speed",
    [
      { title: "Tokens per second", metrics: ["train/tokens_per_s"], absent: "The run has logged none." },
      {
        title: "Model FLOPs utilisation (MFU)",
        metrics: ["train/mfu"],
        absent: "The peak FLOP/s of this device is not known.",
      },
      { title: "Step time", metrics: ["train/step_s", "system/step_s_p90", "train/data_wait_s"], optional: true },
    ],
  ],
  [
    "Hardware",
    [
      {
        title: "Device memory",
        metrics: ["system/device_memory_bytes", "system/device_memory_peak_bytes", "system/device_memory_limit_bytes"],
        absent: "The device reports none, or SystemMetrics is off.",
      },
      {
        title: "TPU utilisation",
        metrics: ["system/tensorcore_util_percent", "system/duty_cycle_percent"],
        absent: TPU_ONLY,
      },
      {
        title: "Host memory",
        metrics: ["system/process_memory_bytes", "system/host_memory_bytes", "system/host_memory_limit_bytes"],
        absent: "SystemMetrics is off.",
      },
      { title: "Host CPU", metrics: ["system/host_cpu_percent"], optional: true },
      { title: "Free disk", metrics: ["system/disk_free_bytes"], optional: true },
      { title: "TPU throttling", metrics: ["system/throttle_score"], optional: true },
    ],
  ],
  [
    "Mixture and consensus",
    [
      { title: "Consensus score", metrics: ["train/consensus_score"], optional: true },
      { title: "Router entropy", metrics: ["train/router_entropy"], optional: true },
    ],
  ],
];
const NAMES = {
  "train/loss": "training",
  "eval/loss": "evaluation",
  "eval/perplexity": "evaluation",
  "train/perplexity": "training",
  "train/token_accuracy": "training",
  "eval/token_accuracy": "evaluation",
  "train/step_s": "step",
  "system/step_s_p90": "90th percentile",
  "train/data_wait_s": "waiting for data",
  "system/device_memory_bytes": "in use",
  "system/device_memory_peak_bytes": "peak",
  "system/device_memory_limit_bytes": "limit",
  "system/tensorcore_util_percent": "TensorCore",
  "system/duty_cycle_percent": "duty cycle",
  "system/process_memory_bytes": "this process",
  "system/host_memory_bytes": "host",
  "system/host_memory_limit_bytes": "limit",
};
const OWN_PAGE = /\/(node_\d+|expert_load)\//; // shown by the tabs of nodes and experts

/** Of a metric, in a legend beside others of its chart. */
export function lineName(metric) {
  return NAMES[metric] ?? title(metric);
}

/**
 * The sections of a run's charts: [name, specs]; a spec whose metrics are all missing has none.
 * @param {string[]} metrics of the run
 */
export function sections(metrics) {
  const there = new Set(metrics);
  const used = new Set();
  const found = STANDARD.map(([name, specs]) => [
    name,
    specs.flatMap((spec) => {
      const own = spec.metrics.filter((metric) => there.has(metric));
      own.forEach((metric) => used.add(metric));
      return own.length || !spec.optional ? [{ ...spec, metrics: own }] : [];
    }),
  ]);
  const others = metrics.filter((metric) => !used.has(metric) && !OWN_PAGE.test(metric));
  return [...found.filter(([, specs]) => specs.length), ["Other metrics", others.map(single)]];
}

/** A chart of one metric. */
export function single(metric) {
  return {
    title: `${title(metric)}${metric.startsWith("train/") ? "" : ` (${metric.slice(0, metric.indexOf("/"))})`}`,
    metrics: [metric],
  };
}

/** For runs beside each other: one metric a chart, the usual ones first. */
export function comparison(metrics) {
  const usual = [
    "train/loss",
    "eval/loss",
    "eval/perplexity",
    "train/grad_norm",
    "train/learning_rate",
    "train/tokens_per_s",
    "train/mfu",
    "eval/token_accuracy",
    "train/consensus_score",
  ];
  const words = {
    "train/loss": "Training loss",
    "eval/loss": "Evaluation loss",
    "eval/perplexity": "Perplexity (evaluation)",
    "train/grad_norm": "Gradient norm",
    "train/learning_rate": "Learning rate",
    "train/tokens_per_s": "Tokens per second",
    "train/mfu": "Model FLOPs utilisation (MFU)",
    "eval/token_accuracy": "Token accuracy (evaluation)",
    "train/consensus_score": "Consensus score",
  };
  const first = usual.filter((metric) => metrics.includes(metric));
  const others = metrics.filter((metric) => !first.includes(metric) && !OWN_PAGE.test(metric));
  return [
    ["Curves", first.map((metric) => ({ title: words[metric], metrics: [metric] }))],
    ["Other metrics", others.map(single)],
  ];
}

/** The specs whose title or metric matches; null: all. */
export function matching(specs, expression) {
  return expression === null
    ? specs
    : specs.filter((spec) => [spec.title, ...spec.metrics].some((text) => expression.test(text)));
}
