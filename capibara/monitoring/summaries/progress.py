"""Progress of a run in the terminal: one live line, or plain lines if the output is not a terminal."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.monitoring.metrics_file import goodput
from capibara.monitoring.metrics_file.loggers import mfu
from capibara.monitoring.reading.whole import whole
from capibara.training.base.callbacks import Callback, RunInfo

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_LIVE_EVERY_S = 0.2  # least time between updates of the live line during an evaluation or a rollout
_LINE_EVERY_S = 30.0  # time between plain lines
_WAITING = "waiting for the first step"
_SPEED_MEMORY = 0.8  # decay of the moving average of the step time, which gives the remaining time


@configurable
class ProgressLine(Callback):
    """Shows step, loss, learning rate, speed, MFU and the time left; evaluations and samples as lines of their own.

    Args:
      sample_characters: samples are truncated to this length; the whole text is in metrics.jsonl.
      console: where to print; None: standard output.
    """

    def __init__(self, *, sample_characters: int = 600, console: Console | None = None):
        self._sample_characters = sample_characters
        self._given_console = console
        self._live: Live | None = None
        self._run: RunInfo  # set by on_train_begin
        self._start = self._last_time = 0.0
        self._shown_s = 0.0  # time of the last output
        self._line, self._evaluated = _WAITING, False
        self._last_step = 0
        self._seconds_per_step: float | None = None

    def on_status(self, text: str) -> None:
        self._print(text, style="dim")

    def on_progress(self, text: str) -> None:
        now = time.perf_counter()
        if not text:
            if self._live is not None:
                self._show_live(self._live, self._last_step, self._line)
        elif self._live is None and now > self._shown_s + _LINE_EVERY_S:
            self._print(text, style="dim")
        elif self._live is not None and now > self._shown_s + _LIVE_EVERY_S:
            self._show_live(self._live, self._last_step, text)

    @functools.cached_property
    def _console(self) -> Console:
        return self._given_console or make_console()

    def on_train_begin(self, run: RunInfo) -> None:
        self._run = run
        self._start = self._last_time = time.perf_counter()
        self._last_step = run.start_step
        self._print(_start_line(run), style="bold")
        if self._console.is_terminal and run.start_step < run.total_steps:
            self._live = _live_line(self._console)
            self._live.start()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.perf_counter()
        seconds = (now - self._last_time) / max(1, step - self._last_step)
        past = self._seconds_per_step
        self._seconds_per_step = seconds if past is None else _SPEED_MEMORY * past + (1 - _SPEED_MEMORY) * seconds
        self._last_time, self._last_step = now, step
        self._line = self._step_line(step, metrics, self._seconds_per_step)
        if self._live is None:
            self._print(self._line)
        else:
            self._show_live(self._live, step, self._line)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        self._evaluated = True
        self._print(f"step {step} evaluation: {_evaluation(metrics)}", style="cyan")

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        from rich.text import Text

        shown = printable(text).rstrip()
        if len(shown) > self._sample_characters:
            shown = shown[: self._sample_characters] + " ..."
        body = Text.assemble((printable(prompt), "bold"), shown)
        lines = body.split("\n", allow_blank=True)
        self._print(f"step {step} sample:", style="cyan")
        self._console.print(Text("\n").join(Text.assemble(("  | ", "dim"), line) for line in lines), soft_wrap=True)

    def on_checkpoint(self, step: int) -> None:
        self._print(f"step {step} saving", style="dim")

    def on_train_end(self, step: int, reason: str) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        done, seconds = step - self._run.start_step, time.perf_counter() - self._start
        if not (done or self._evaluated) and reason != "interrupted":
            self._print(_nothing_left(self._run, reason), style="bold")
            return
        words = {"early_stopping": "stopped early", "privacy_budget": "privacy budget spent"}
        with contextlib.suppress(UserError):  # a run without a metrics file
            if shares := goodput.line(whole(self._run.model_dir).goodput()):
                self._print(shares, style="dim")
        self._print(
            f"{words.get(reason, reason)} at step {step}: {_count(done, 'step')} in {duration(seconds)}; "
            f"run folder {self._run.model_dir}",
            style="bold",
        )

    def _step_line(self, step: int, metrics: Mapping[str, float], seconds_per_step: float) -> str:
        total = self._run.total_steps
        parts = [f"step {step:>{len(str(total))}}/{total}", f"loss {metrics['loss']:z.4f}"]
        rewards = ("reward", "reward_margin")
        parts += [f"{name.replace('_', ' ')} {metrics[name]:z.3f}" for name in rewards if name in metrics]
        if "learning_rate" in metrics:
            parts.append(f"lr {metrics['learning_rate']:.2e}")
        if "grad_norm" in metrics:
            parts.append(f"grad {metrics['grad_norm']:.3g}")
        if "epsilon" in metrics:
            parts.append(f"epsilon {metrics['epsilon']:.3g}")
        if metrics.get("skipped"):
            parts.append(f"{_count(int(metrics['skipped']), 'update')} skipped")
        if "tokens_per_s" in metrics:
            parts.append(f"{quantity(metrics['tokens_per_s'])} tokens/s")
        step_s = metrics.get("step_s", 0.0)
        if (utilisation := mfu(self._run, step_s)) is not None:
            parts.append(f"MFU {utilisation:.1%}")
        if step_s > 0 and metrics.get("data_wait_s", 0.0) / step_s >= 0.01:
            parts.append(f"data wait {metrics['data_wait_s'] / step_s:.0%}")
        parts.append(f"ETA {duration((total - step) * seconds_per_step)}")
        return "  ".join(parts)

    def _show_live(self, live: Live, step: int, line: str) -> None:
        from rich.text import Text

        self._shown_s = time.perf_counter()
        bar = progress_bar(step / self._run.total_steps, width=20)
        live.update(Text.assemble((bar, "green"), " ", line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _print(self, line: str, style: str = "") -> None:
        self._shown_s = time.perf_counter()
        # Text, not markup: a path or a sample may contain square brackets. The terminal wraps long lines.
        from rich.text import Text

        self._console.print(Text(line, style), soft_wrap=True)


def make_console() -> Console:
    """A console on standard output; characters that its encoding does not have are escaped."""
    import sys

    from rich.console import Console

    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    if not encoding.startswith("utf") and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(highlight=False)


def quantity(value: float) -> str:
    """A number in three or four digits: 950, 41.2k, 1.24M, 135M, 7.1B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999,999 would round to 1000k.
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.3g}{unit}" if scaled < 999.5 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A duration in its two largest units: 42s, 3m05s, 2h10m, 3d04h."""
    rounded = max(0, round(seconds))
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    if rounded < 86400:
        return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"
    return f"{rounded // 86400}d{rounded % 86400 // 3600:02d}h"


def printable(text: str) -> str:
    """`text` with control characters escaped, so that a sample cannot drive the terminal; newlines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def progress_bar(share: float, width: int) -> str:
    """`width` characters of which `share` are filled, to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(width, "·")


def _live_line(console: Console) -> Live:
    import atexit
    import sys

    from rich.live import Live
    from rich.text import Text

    live = Live(
        Text(_WAITING),
        console=console,
        auto_refresh=False,  # no thread, which would take CPU time from the step: refresh when a step is logged
        transient=True,
        redirect_stderr=sys.stderr.isatty(),  # otherwise errors would go to standard output
    )
    atexit.register(live.stop)  # shows the cursor again after a fault
    return live


def _nothing_left(run: RunInfo, reason: str) -> str:
    if reason == "privacy_budget":
        return f"nothing to do: the privacy budget is spent at step {run.start_step}; raise Privacy.budget to continue"
    if reason == "early_stopping":
        return f"nothing to do: the run stopped early at step {run.start_step}; raise Evaluation.patience to continue"
    return (
        f"nothing to do: the run is at step {run.start_step} of {run.total_steps} already; raise TRAIN_STEPS "
        "(--gin.TRAIN_STEPS=...) to continue"
    )


def _start_line(run: RunInfo) -> str:
    devices = f"{run.device_count} x {run.device_kind}"
    if run.start_step >= run.total_steps:
        return f"{quantity(run.param_count)} parameters on {devices}"
    steps = f"steps {run.start_step} to {run.total_steps}" if run.start_step else f"{_count(run.total_steps, 'step')}"
    resuming = f"resuming from step {run.start_step}; " if run.start_step else ""
    return (
        f"{resuming}{quantity(run.param_count)} parameters on {devices}; {steps} of "
        f"{quantity(run.tokens_per_step)} tokens"
    )


def _evaluation(metrics: Mapping[str, float]) -> str:
    formats = {
        "loss": "loss {:z.4f}",
        "perplexity": "perplexity {:.2f}",
        "bits_per_byte": "{:.4f} bits per byte",
        "token_accuracy": "token accuracy {:.1%}",
        "reward_accuracy": "reward accuracy {:.1%}",
        "reward_margin": "reward margin {:z.4f}",
        "reward": "reward {:z.4f}",
    }
    shown = [text.format(metrics[name]) for name, text in formats.items() if name in metrics]
    if "unigram_bits_per_byte" in metrics:
        shown.append(f"unigram {metrics['unigram_bits_per_byte']:.4f} bits per byte")
    return ", ".join(shown)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
