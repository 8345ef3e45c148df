"""The verbs of the command line as functions of Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capibara.api import files
from capibara.core.types import UserError
from capibara.interop import hub

if TYPE_CHECKING:
    from capibara.api.language_model import LanguageModel
    from capibara.consensus.merging.method import Method


def convert(
    source: LanguageModel | str,
    target: str,
    *,
    format: str | None = None,
    dtype: str | None = None,
    base: str | None = None,
    trust: bool = False,
) -> str:
    """Writes a model in another format, as `capibara convert` does; returns the path.

    Args:
      source: a path or name, as for `load`, or a loaded model, which is read again from its path.
      target: a new folder or file.
      format: hf, pytorch, gguf, t5x, peft, peft_fused, gguf_lora or capibara; None: hf, gguf for x.gguf.
      dtype: of the stored tensors, such as bf16 or q4_k_m; None: unchanged, bf16 for a run.
      base: path of an adapter's base; None: the one that it names.
      trust: whether to import the modules that a run's configuration names.

    Raises:
      UserError: the target exists, the model cannot be read, or the format cannot hold it.
    """
    base = None if base is None else hub.local_path(base)
    return files.convert(_path(source), target, format=format, dtype=dtype, base=base, trust=trust)


def merge(
    models: Sequence[LanguageModel | str],
    target: str,
    method: Method,
    *,
    base: LanguageModel | str | None = None,
    tokenizer: LanguageModel | str | None = None,
    seed: int = 0,
    format: str | None = None,
    dtype: str | None = None,
    trust: bool = False,
) -> str:
    """Merges models of one architecture into one, as `capibara merge` does; returns the path.

    Args:
      models: paths, names or loaded models.
      target: a new folder or file.
      method: how, such as capibara.Linear() or capibara.Ties(density=0.3).
      base: the model that they were fine-tuned from, for methods that merge offsets from it.
      tokenizer: the model whose tokenizer the result has; None: that of the first, and all must be the same.
      seed: of random masks.
      format, dtype, trust: as for `convert`.

    Raises:
      UserError: the models cannot be merged so.
    """
    from capibara.cli.composition.models import ModelReader
    from capibara.interop.merge import merging

    what = merging.Merge(
        models=tuple(_path(one) for one in models),
        method=method,
        base=None if base is None else _path(base),
        tokenizer=None if tokenizer is None else _path(tokenizer),
        seed=seed,
    )
    merging.merge(what, target, format, dtype, ModelReader(trust=trust))
    return target


def evaluate(
    model: LanguageModel | str,
    tasks: Mapping[str, Any] | None = None,
    *,
    limit: int | None = None,
    step: int | None = None,
    weights: str | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Scores a model as `capibara evaluate` does: its loss on held-out text, or its answers to tasks.

    Args:
      model: a path or name, as for `load`, or a loaded model, which is read again from its path.
      tasks: name -> `capibara.EvalTask`; None: the validation split of the run.
      limit: the largest number of examples of a task, or of batches of the validation split.
      step, weights, trust: as for `load`.

    Returns:
      What `capibara evaluate --out` writes: of each task its metrics, with their standard errors.

    Raises:
      UserError: a task or the model cannot be read.
    """
    from capibara.cli.composition import models
    from capibara.evaluation import evaluate as evaluation
    from capibara.evaluation import tasks as of_ours
    from capibara.evaluation.evaluate import Ours, Task, Validation

    if limit is not None and limit < 1:
        raise UserError(f"limit ({limit}) must be at least 1")
    chosen: list[Task] = [
        Ours(name, task, of_ours.read_items(name, task, limit)) for name, task in (tasks or {}).items()
    ] or [Validation()]
    subject = models.open_subject(_path(model), step=step, weights=weights, trust=trust)
    subject.template = models.chat_template(subject.trainer.dataset) if tasks else None
    return evaluation.evaluate(subject, chosen, limit=limit, predictions=None, show=lambda topic, detail: None)


def _path(model: LanguageModel | str) -> str:
    return hub.local_path(model) if isinstance(model, str) else model.path
