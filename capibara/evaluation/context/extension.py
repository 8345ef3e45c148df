"""Extends the context of a model: searches a scaling of its rotary positions and compares it with others, without training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from capibara.config import written
from capibara.core.types import UserError
from capibara.evaluation.context.losses import Losses, read_rows
from capibara.evaluation.context.search import Individual, Loss, RopeSearch, search
from capibara.evaluation.predictions import Predictions
from capibara.evaluation.subject import Subject
from capibara.interop.hf import config as hf_config
from capibara.models.api import DecoderConfig, LayerKind, Rope, RopeScaling
from capibara.storage import outputs

GIN, REPORT, EVALUATIONS = "rope.gin", "rope.json", "evaluations.jsonl"
Show = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True)
class Extension:
    """What is extended to what.

    Attributes:
      model: path of the model, for errors.
      config: its configuration.
      original_length: tokens of a row in pre-training.
      length: tokens of a row that it should read.
    """

    model: str
    config: DecoderConfig
    original_length: int
    length: int

    @classmethod
    def of(cls, subject: Subject, length: int, original_length: int | None) -> Extension:
        """Checks that the model's rotary positions can be scaled.

        Args:
          subject: the model.
          length: tokens of a row that it should read.
          original_length: tokens of a row in pre-training; None: what the
            model is for at most, or of its run's rows.

        Raises:
          UserError: they cannot, or not to this length, or no config.json of its family could say it.
        """
        model, config = str(subject.about["model"]), subject.model.config
        if not isinstance(config, DecoderConfig) or config.positions != "rope":
            kind = f"positions {str(getattr(config, 'positions', 'none'))!r}"
            raise UserError(
                f"{model} is a {type(config).__name__} with {kind}, and rotary positions of a decoder are extended: name another "
                "model"
            )
        if (count := jax.process_count()) > 1:
            raise UserError(f"prepare rope is for one process, and there are {count}: start one alone")
        if config.rope.scaling != "none":
            raise UserError(
                f"{model} has Rope.scaling = {str(config.rope.scaling)!r}, and a search begins from positions that are not scaled: "
                "name the model before its context was extended"
            )
        original = original_length or config.max_length or subject.trainer.dataset.length
        if not original < length < 2**31:
            raise UserError(
                f"--length={length} must be above the {original} tokens of {model}, and below 2**31: try {4 * original}"
            )
        result = cls(model, config, original, length)
        result.entries(result.rope(Individual((1.0,) * result.frequencies), None))  # raises before anything is compiled
        return result

    @property
    def ratio(self) -> float:
        """Of the lengths."""
        return self.length / self.original_length

    @property
    def frequencies(self) -> int:
        """The number of frequencies."""
        return self.config.rope.rotated_dims(self._head_dim) // 2

    @property
    def _head_dim(self) -> int:
        return self.config.attention_of(LayerKind.GLOBAL).rotary_size

    def rope(self, individual: Individual, attention_factor: float | None) -> Rope:
        """The rotary positions with a scaling in longer rows than those of pre-training."""
        return dataclasses.replace(
            self.config.rope,
            scaling=RopeScaling.LONGROPE,
            factor=self.ratio,
            original_length=self.original_length,
            attention_factor=attention_factor,
            short_factors=(1.0,) * len(individual.factors),
            long_factors=individual.factors,
            unscaled_tokens=individual.unscaled_tokens,
        )

    def extended(self, rope: Rope) -> DecoderConfig:
        """The configuration with other rotary positions, for rows of the new length."""
        return dataclasses.replace(self.config, rope=rope, max_length=self.length)

    def known(self) -> dict[str, tuple[tuple[float, ...], float]]:
        """Scalings by formulas, which the search starts from: name -> divisors and magnitude.

        linear is position interpolation (arXiv:2306.15595), ntk a higher theta, yarn arXiv:2309.00071.
        """
        count, dims = self.frequencies, 2 * self.frequencies
        yarn = dataclasses.replace(
            self.config.rope, scaling=RopeScaling.YARN, factor=self.ratio, original_length=self.original_length
        )
        plain = self.config.rope.frequencies(self._head_dim).astype(np.float64)
        of_yarn = plain / yarn.frequencies(self._head_dim)
        ntk = self.ratio ** (np.arange(0, dims, 2) / max(dims - 2, 1))
        return {
            "linear": ((self.ratio,) * count, 1.0),
            "ntk": (tuple(ntk.tolist()), 1.0),
            "yarn": (tuple(of_yarn.tolist()), yarn.magnitude()),
        }

    def entries(self, rope: Rope) -> dict[str, Any] | None:
        """What a config.json of transformers says of the extension; None: it does not hold the model anyway.

        Raises:
          UserError: it holds the model, and not the extension.
        """
        try:
            before = hf_config.to_hf(self.config)
        except UserError:
            return None
        if rope.unscaled_tokens:
            return None
        try:
            after = hf_config.to_hf(self.extended(rope), before)
        except UserError as error:
            raise UserError(
                f"{self.model} cannot be written with longrope scaling ({error}): name another model"
            ) from None
        if after["model_type"] != before["model_type"]:
            raise UserError(
                f"config.json of a {before['model_type']} cannot say longrope scaling, as {self.model} would need: name a model of "
                "another family"
            )
        return {key: value for key, value in after.items() if before.get(key) != value}


def extend(
    subject: Subject,
    data: Sequence[str],
    out: str,
    length: int,
    original_length: int | None = None,
    settings: RopeSearch = RopeSearch(),
    show: Show = lambda topic, detail: None,
) -> dict[str, Any]:
    """Searches a scaling, and writes it with a report into a folder; what an interrupted search has computed is used again.

    Args:
      subject: the model.
      data: JSON lines with a `text`: documents of at least `length` tokens.
      out: the folder.
      length, original_length: as in `Extension.of`.
      settings: how is searched.
      show: reports the progress.

    Returns:
      The report, which rope.json holds: the losses in nats a token of each scaling on the documents of the search, on others
      (test), and on their beginnings of the original length (short), where longrope has divisors of 1.

    Raises:
      UserError: as in `Extension.of` and `read_rows`, or the folder has the search of another model or with other settings.
    """
    extension = Extension.of(subject, length, original_length)
    _check_folder(out)
    rows, test = np.split(read_rows(data, subject.vocabulary, length, 2 * settings.documents), [settings.documents])
    losses, magnitude = Losses(subject), extension.rope(Individual((1.0,)), settings.attention_factor).magnitude()
    about = subject.about | {
        "search": dataclasses.asdict(settings) | {"length": length, "original_length": extension.original_length},
        "rows": hashlib.sha256(rows.tobytes()).hexdigest(),
    }
    with Predictions(os.path.join(out, EVALUATIONS), about, f"--out={out}", "model, data or settings") as recorded:
        best, count = _searched(
            extension,
            settings,
            lambda item: losses(rows, item.factors, magnitude, item.unscaled_tokens),
            recorded,
            show,
        )
    rope = extension.rope(best, settings.attention_factor)
    report = {
        "model": extension.model, "original_length": extension.original_length, "length": length,
        "documents": len(rows), "test_documents": len(test), "scalings": count,
        **_compared(extension, losses, rows, test, rope),
        "factors": list(best.factors), "attention_factor": magnitude, "unscaled_tokens": best.unscaled_tokens,
        "config": extension.entries(rope),
    }  # fmt: skip
    outputs.save(os.path.join(out, GIN), gin_text(extension, rope))
    outputs.save(os.path.join(out, REPORT), json.dumps(report, indent=1) + "\n")
    return report


def _searched(
    extension: Extension, settings: RopeSearch, compute: Loss, recorded: Predictions, show: Show
) -> tuple[Individual, int]:
    """The best scaling, and the number of all whose loss was computed or is recorded."""
    starts = [Individual(tuple(max(1.0, value) for value in factors)) for factors, _ in extension.known().values()]
    count = 0

    def loss(individual: Individual) -> float:
        nonlocal count
        count += 1
        request = {"factors": list(individual.factors), "unscaled_tokens": individual.unscaled_tokens}
        if (line := recorded.known(request)) is None:
            line = recorded.add(request, {"loss": compute(individual)})
        (value,) = recorded.numbers(line, "loss", 1)
        show("searching", f"{count} of at most {settings.evaluations} scalings, loss {value:.4f}")
        return value

    best, least = search(settings, starts, settings.reach * extension.ratio, loss)
    if not math.isfinite(least):
        raise UserError(
            f"{extension.model} has no finite loss with any of {count} scalings: name a model that has not diverged, or leave "
            "RopeSearch.attention_factor out"
        )
    return best, count


def _check_folder(out: str) -> None:
    """Raises UserError if files in the folder would be overwritten that are of no search."""
    for name in (GIN, REPORT):
        if os.path.lexists(path := os.path.join(out, name)) and not os.path.lexists(os.path.join(out, EVALUATIONS)):
            raise UserError(f"{path} exists, and is of no search (there is no {EVALUATIONS}): name another --out")


def _compared(
    extension: Extension, losses: Losses, rows: np.ndarray, test: np.ndarray, rope: Rope
) -> dict[str, dict[str, float]]:
    """The losses of the search's scaling, of those by formulas and of none: on its rows, on test rows and on their beginnings."""
    ones, magnitude = (1.0,) * extension.frequencies, rope.magnitude()
    scalings = {"unchanged": (ones, 1.0, 0)} | {name: (*scaling, 0) for name, scaling in extension.known().items()}
    long = scalings | {"longrope": (rope.long_factors, magnitude, rope.unscaled_tokens)}
    short = scalings | {"longrope": (ones, magnitude, 0)}
    beginnings = (test if len(test) else rows)[:, : extension.original_length + 1]
    return {
        "loss": {name: losses(rows, *scaling) for name, scaling in long.items()},
        "test": {name: losses(test, *scaling) for name, scaling in long.items()} if len(test) else {},
        "short": {name: losses(beginnings, *scaling) for name, scaling in short.items()},
    }


def gin_text(extension: Extension, rope: Rope) -> str:
    """The bindings of an extension, after those of the model."""
    kind = type(extension.config).__name__
    lines = written.bindings(rope, scope="extended")
    return "\n".join(
        [
            f"# {extension.model} in rows of {extension.length} tokens: capibara prepare rope.",
            f"{kind}.rope = @extended/Rope()",
            *lines,
            f"{kind}.max_length = {extension.length}",
            f"Dataset.length = {extension.length}",
            "",
        ]
    )


def table(report: dict[str, Any]) -> list[str]:
    """The losses as lines of text."""
    rows = [("scaling", "loss", "test", "short")]
    for name, value in report["loss"].items():
        test = f"{report['test'][name]:.4f}" if report["test"] else ""
        rows.append((name, f"{value:.4f}", test, f"{report['short'][name]:.4f}"))
    return [f"{name:<10}{loss:>9}{test:>9}{short:>9}".rstrip() for name, loss, test, short in rows]
