"""Makes run folders that look like real ones, for tests and for looking at the dashboard.

python tests/monitoring/dashboard/demo.py FOLDER [--live]
"""

from __future__ import annotations

import json
import math
import pathlib
import random
import sys
import time

CONFIG = """# Macros:
# ==============================================================================
MODEL_DIR = 'runs/{name}'

# Parameters for Trainer:
# ==============================================================================
Trainer.log_every = 10
Trainer.model_dir = %MODEL_DIR
Trainer.seed = {seed}
Trainer.steps = {steps}

# Parameters for Optimizer:
# ==============================================================================
Optimizer.learning_rate = {rate}

# Parameters for ConsensusConfig:
# ==============================================================================
ConsensusConfig.quality_threshold = 0.5
"""
POEM = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"
MALICIOUS = "<script>alert('sample')</script><img src=x onerror=alert(1)> & \u202e\u0007 \"quotes\""


class Demo:
    """Writes one run's lines as MetricsFile and SystemMetrics do.

    Args:
      folder: the run folder.
      steps: at which it ends.
      log_every: steps between lines.
      nodes, experts: how many; 0: none.
      seed: of the noise.
      began_s: seconds since 1970.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        steps: int = 2000,
        log_every: int = 10,
        nodes: int = 0,
        experts: int = 0,
        seed: int = 0,
        began_s: float | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.steps, self.log_every, self.nodes, self.experts = folder, steps, log_every, nodes, experts
        self.noise, self.step_s = random.Random(seed), 0.85 + 0.1 * seed
        self.now_s = began_s if began_s is not None else time.time() - steps * self.step_s * 1.15
        rate = 3e-4 * (1 + seed)
        self.rate = rate
        (folder / "config.gin").write_text(CONFIG.format(name=folder.name, seed=seed, steps=steps, rate=rate))
        self.file = open(folder / "metrics.jsonl", "a", encoding="utf-8")

    def write(self, kind: str, step: int, **fields: object) -> None:
        record = {"kind": kind, "step": step, "time": round(self.now_s, 3), **fields}
        self.file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self.file.flush()

    def start(self, step: int = 0) -> None:
        """A start, or a restart from a checkpoint."""
        self.now_s += 20.0
        facts = {"total_steps": self.steps, "param_count": 135_000_000, "tokens_per_step": 524_288}
        facts |= {"flops_per_step": 4.2e14, "device_count": 8, "device_kind": "TPU v5 lite", "peak_flops": 1.97e14}
        self.write("event", step, event="start", **facts)
        self.write("event", step, event="spent", start=6.0, set_up=12.0, restore=2.0 if step else 0.0)
        git = {"commit": "4f3c2a1b9d8e", "branch": "main", "dirty": False, "diff_stat": None}
        about = {"host": "worker-0", "cpus": 112, "python": "3.12.3", "devices": "8 x TPU v5 lite", "git": git}
        self.write("event", step, event="facts", facts=about)

    def loss(self, step: int) -> float:
        return 2.1 + 8.0 / math.sqrt(1 + step / 8) + self.noise.gauss(0, 0.03)

    def train(self, step: int, **more: object) -> None:
        """One line of training."""
        self.now_s += self.step_s * self.log_every
        step_s = self.step_s * (1 + 0.02 * self.noise.random())
        fields: dict[str, object] = {
            "loss": self.loss(step),
            "grad_norm": 0.4 + 3 / (1 + step / 50) + 0.1 * self.noise.random(),
            "learning_rate": self.rate * min(1, step / 100) * 0.5 * (1 + math.cos(math.pi * step / self.steps)),
            "tokens": 524_288.0 * self.log_every,
            "token_accuracy": 0.62 - 0.5 / (1 + step / 60),
            "step_s": step_s,
            "tokens_per_s": 524_288 / step_s,
            "data_wait_s": 0.01 * self.noise.random(),
            "mfu": 4.2e14 / step_s / (8 * 1.97e14),
        }
        fields |= self._node_fields(step) | self._expert_fields(step) | more
        self.write("train", step, **fields)

    def _node_fields(self, step: int) -> dict[str, object]:
        if not self.nodes:
            return {}
        bad = {2} if 600 <= step < 1200 else set()
        fields: dict[str, object] = {"consensus_score": (self.nodes - len(bad)) / self.nodes, "failed_rounds": 0.0}
        fields["spare_faults"] = 1.0 - len(bad)
        for node in range(self.nodes):
            own = {"loss": self.loss(step) + (1.5 if node in bad else 0.0), "quality": 0.3 if node in bad else 0.95}
            own |= {"distance": -1.0 if node in bad else 0.1 + 0.01 * node, "accepted": float(node not in bad)}
            fields |= {f"node_{node}/{name}": value for name, value in own.items()}
        return fields

    def _expert_fields(self, step: int) -> dict[str, object]:
        if not self.experts:
            return {}
        loads = [
            1 + 0.6 * math.sin(expert * 1.7 + step / 300) * math.exp(-step / 900) for expert in range(self.experts)
        ]
        loads = [load * (1 + 0.05 * self.noise.random()) for load in loads]
        mean = sum(loads) / len(loads)
        fields: dict[str, object] = {f"expert_load/{expert}": load / mean for expert, load in enumerate(loads)}
        entropy = 0.97 - 0.2 * math.exp(-step / 400)
        return fields | {
            "router_entropy": entropy,
            "expert_load_max": max(loads) / mean,
            "expert_load_min": min(loads) / mean,
        }

    def evaluate(self, step: int) -> None:
        self.now_s += 4.0
        loss = self.loss(step) + 0.05
        accuracy, bits = 0.6 - 0.5 / (1 + step / 60), loss / math.log(2) / 4.1
        fields = {"perplexity": math.exp(loss), "token_accuracy": accuracy, "tokens": 1e6, "bits_per_byte": bits}
        self.write("eval", step, loss=loss, **fields)

    def sample(self, step: int) -> None:
        self.write("sample", step, prompt="def ", text=POEM[4 : 4 + max(10, step // 15)])
        self.write("sample", step, prompt="Once upon a time", text=f" at step {step} there was a model. {MALICIOUS}")

    def system(self, step: int) -> None:
        gib = 1 << 30
        host = {"host_memory_bytes": 41 * gib, "host_memory_limit_bytes": 188 * gib, "process_memory_bytes": 22 * gib}
        host |= {"host_cpu_percent": 20 + 5 * self.noise.random(), "process_cpu_percent": 410.0, "cpus": 112}
        device = {
            "device_memory_bytes": 11 * gib,
            "device_memory_peak_bytes": 13 * gib,
            "device_memory_limit_bytes": 16 * gib,
        }
        device |= {"tensorcore_util_percent": 61 + self.noise.random(), "duty_cycle_percent": 97.0}
        times = {"compile_s": 38.2, "compiles": 4, "step_s_p50": self.step_s, "step_s_p90": self.step_s * 1.02}
        lists = {"devices": {"device_memory_bytes": [11 * gib] * 8, "duty_cycle_percent": [97.0] * 8}}
        self.write("system", step, **host, **device, **times, disk_free_bytes=(300 * gib) - step * 1_000_000, **lists)

    def run(self, first: int, last: int) -> None:
        """Lines of steps after `first` up to `last`, with what belongs between them."""
        for step in range(first + self.log_every, last + 1, self.log_every):
            self.train(step)
            if step % 50 == 0:
                self.system(step)
            if step % 200 == 0:
                self.evaluate(step)
                self.sample(step)
            if step % 500 == 0:
                self.write("event", step, event="checkpoint")

    def end(self, reason: str = "finished") -> None:
        self.write("event", self.steps, event="end", reason=reason)
        self.file.close()


def make(folder: pathlib.Path) -> Demo:
    """Seven runs: finished, resumed, with nodes, with experts, stalled, of a hostile name, and one that goes on."""
    whole = Demo(folder / "baseline", began_s=time.time() - 9000)
    whole.start()
    whole.run(0, 1500)
    whole.train(1510, loss=7.9)
    whole.train(1520, loss=None, skipped=2.0)
    whole.run(1520, 2000)
    whole.end()
    resumed = Demo(folder / "group" / "resumed", seed=1, began_s=time.time() - 20_000)
    resumed.start()
    resumed.run(0, 900)
    resumed.train(910, loss=None, skipped=3.0)
    resumed.train(920, loss=9.5)
    resumed.file.write('{"kind": "train", "step": 930, "ti\n')  # as a killed run leaves it
    resumed.now_s += 300
    resumed.start(500)
    resumed.run(500, 1400)
    resumed.write("event", 1200, event="roll_back")
    resumed.run(1200, 2000)
    resumed.end("interrupted")
    nodes = Demo(folder / "group" / "four nodes", nodes=4, seed=2, began_s=time.time() - 15_000)
    nodes.start()
    nodes.run(0, 2000)
    nodes.end()
    experts = Demo(folder / "experts", experts=16, seed=3, began_s=time.time() - 12_000)
    experts.start()
    experts.run(0, 2000)
    experts.end("early_stopping")
    stalled = Demo(folder / "stalled", seed=4, began_s=time.time() - 6000)
    stalled.start()
    stalled.run(0, 700)
    stalled.file.close()
    hostile = Demo(folder / "<img src=x onerror=alert(1)>", seed=5, began_s=time.time() - 4000)
    hostile.start()
    hostile.train(10, **{"<script>alert(2)</script>": 1.0, "__proto__": 2.0})
    hostile.run(10, 300)
    hostile.end()
    live = Demo(folder / "live", steps=100_000, nodes=3, experts=8, seed=6, log_every=1, began_s=time.time() - 1500)
    live.step_s = 1.0
    live.start()
    live.run(0, 1400)
    return live


def main(argv: list[str]) -> None:
    """Makes the runs; with --live goes on with one of them for ever."""
    live = make(pathlib.Path(argv[0]))
    step = 1400
    while "--live" in argv:
        time.sleep(1.0)
        live.now_s = time.time() - live.step_s
        live.run(step, step + 1)
        step += 1


if __name__ == "__main__":
    main(sys.argv[1:])
