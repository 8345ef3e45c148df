"""The verbs of the command line as functions of Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capibara.api.stored import Loaded, file_path, path_of, stored_path
from capibara.core.fields import did_you_mean, short
from capibara.core.types import UserError

if TYPE_CHECKING:
    from capibara.consensus.merging.method import Method
    from capibara.evaluation.context.search import RopeSearch
    from capibara.interop.experts.operation import ExpertOperation
    from capibara.interop.experts.statistics import Statistics


def convert(
    source: Loaded | str,
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
    from capibara.cli.composition.models import ModelReader
    from capibara.interop import conversion

    if not isinstance(target, str) or not target:
        raise UserError(f"the target is {target!r}, must be a new path: try 'mine.gguf'")
    if format is not None and format not in conversion.FORMATS:
        raise UserError(
            f"format is {format!r}, must be one of {', '.join(conversion.FORMATS)}{did_you_mean(str(format), conversion.FORMATS)}"
        )
    base = None if base is None else path_of(base, "base")
    conversion.convert(stored_path(source, "source"), target, format, dtype, base, ModelReader(trust=trust))
    return target


def merge(
    models: Sequence[Loaded | str],
    target: str,
    method: Method,
    *,
    base: Loaded | str | None = None,
    tokenizer: Loaded | str | None = None,
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
    from capibara.consensus.merging.method import Method
    from capibara.interop.merge import merging

    if isinstance(models, str) or not isinstance(models, Sequence):
        raise UserError(f"models is {models!r}, must be several: try merge([a, b], target, cb.Linear())")
    if not isinstance(method, Method):
        raise UserError(f"method is {method!r}, must be a method such as cb.Linear() or cb.Ties(density=0.3)")
    merge = merging.Merge(
        models=tuple(stored_path(model) for model in models),
        method=method,
        base=None if base is None else stored_path(base, "base"),
        tokenizer=None if tokenizer is None else stored_path(tokenizer, "tokenizer"),
        seed=seed,
    )
    merging.merge(merge, target, format, dtype, ModelReader(trust=trust))
    return target


def expert_statistics(
    model: Loaded | str,
    data: Sequence[str] = (),
    *,
    domains: Sequence[str] = (),
    limit: int | None = None,
    step: int | None = None,
    weights: str | None = None,
    trust: bool = False,
) -> Statistics:
    """How a model uses its experts, as `capibara experts stats` measures it; `write(path)` of the result is its file.

    Args:
      model: a path or name, as for `load`, or a loaded model, which is read again from its path.
      data: JSON lines files with a `text` and optionally a `domain`; empty: the validation split of the run.
      domains: the domains that count apart; empty: those of the run's data.
      limit: the largest number of batches; None: all.
      step, weights, trust: as for `load`.

    Raises:
      UserError: the model or the data cannot be read, or it has no experts that tokens choose.
    """
    from capibara.cli.composition import models
    from capibara.evaluation.experts import use

    for name, value in (("data", data), ("domains", domains)):
        if isinstance(value, str) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{name} is {value!r}, must be a list of texts: try ['python']")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise UserError(f"limit is {limit!r}, must be a number of at least 1, or None")
    with models.PARSING:
        subject = models.open_subject(stored_path(model), step=step, weights=weights, trust=trust)
        return use.measured(subject, data, domains, limit=limit)


def rewire(
    model: Loaded | str,
    target: str,
    operation: ExpertOperation,
    *,
    statistics: str | None = None,
    format: str | None = None,
    dtype: str | None = None,
    trust: bool = False,
) -> str:
    """Writes a model with other experts, as `capibara experts` does; returns the path.

    Args:
      model: a path or name, as for `load`, or a loaded model, which is read again from its path.
      target: a new folder or file.
      operation: how, such as capibara.PruneExperts(experts=4).
      statistics: the file of the model's statistics; None: the operation needs none.
      format: hf, pytorch, gguf or capibara; None: hf, gguf for x.gguf.
      dtype, trust: as for `convert`.

    Raises:
      UserError: model, statistics and operation do not fit.
    """
    from capibara.cli.composition.models import ModelReader
    from capibara.interop.experts import rewiring
    from capibara.interop.experts.operation import ExpertOperation

    if not isinstance(target, str) or not target:
        raise UserError(f"the target is {target!r}, must be a new path: try 'pruned'")
    if not isinstance(operation, ExpertOperation):
        raise UserError(f"operation is {operation!r}, must be one such as cb.PruneExperts(experts=4)")
    statistics = None if statistics is None else file_path(statistics, "statistics", "statistics.json")
    rewiring.rewire(stored_path(model), target, operation, statistics, format, dtype, ModelReader(trust=trust))
    return target


def prepare_rope(
    model: Loaded | str,
    data: str | Sequence[str],
    out: str,
    length: int,
    *,
    original_length: int | None = None,
    settings: RopeSearch | None = None,
    step: int | None = None,
    weights: str | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Extends a model's context by a scaling of its rotary positions, as `capibara prepare rope` does; returns its report.

    Args:
      model: a path or name, as for `load`, or a loaded model, which is read again from its path.
      data: JSON lines files with a `text`: documents of at least `length` tokens.
      out: the folder to write; one of an interrupted search is completed.
      length: tokens of a row that the model should read.
      original_length: tokens of a row in pre-training; None: of the model's rows.
      settings: how is searched; None: the defaults.
      step, weights, trust: as for `load`.

    Raises:
      UserError: the model has no rotary positions that can be extended so, or no document is long enough.
    """
    from capibara.cli.composition import models
    from capibara.evaluation.context import extension
    from capibara.evaluation.context.search import RopeSearch

    settings = RopeSearch() if settings is None else settings
    if not isinstance(settings, RopeSearch):
        raise UserError(f"settings is {settings!r}, must be cb.RopeSearch(...), or None: the defaults")
    for name, value in (("length", length), ("original_length", original_length)):
        if not (value is None and name == "original_length") and (type(value) is not int or value < 2):
            raise UserError(f"{name} is {value!r}, must be a number of at least 2")
    files = [data] if isinstance(data, str) else data
    if not isinstance(files, Sequence) or not all(isinstance(path, str) for path in files):
        raise UserError(f"data is {short(data)}, must be a path, or a list of paths")
    with models.PARSING:
        subject = models.open_subject(stored_path(model), step=step, weights=weights, trust=trust)
    return extension.extend(subject, files, file_path(out, "out", "runs/longer"), length, original_length, settings)


def evaluate(
    model: Loaded | str,
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
    from capibara import config
    from capibara.cli.composition import models, retrieving
    from capibara.evaluation import evaluate as evaluation
    from capibara.evaluation.evaluate import Ours, Task, Validation
    from capibara.evaluation.tasks import EvalTask
    from capibara.loading import opening

    if limit is not None and (type(limit) is not int or limit < 1):
        raise UserError(f"limit is {limit!r}, must be a number of at least 1, or None")
    if weights not in (None, "ema", "raw"):
        raise UserError(f"weights is {weights!r}, must be 'ema' or 'raw', or None for the averages if there are any")
    if tasks is not None and not (
        isinstance(tasks, Mapping) and all(isinstance(item, EvalTask) for item in tasks.values())
    ):
        raise UserError(
            "tasks must be a dict of names and tasks: try {'qa': cb.EvalTask(files=('qa.jsonl',), metrics=(cb.exact_match,))}"
        )
    for name in tasks or ():
        if not isinstance(name, str) or not config.is_scope(name):  # in which metrics find their bindings
            raise UserError(
                f"tasks has the name {name!r}, must be of letters, digits and _, without a digit first: try 'qa'"
            )
    path = stored_path(model)
    if not tasks and not opening.is_run(path):
        raise UserError(
            f"{path} is no run, so it has no validation split: name tasks, such as {{'qa': cb.EvalTask(...)}}"
        )
    chosen: list[Task] = [
        Ours(name, task, retrieving.items(name, task, limit), models.reward_model(task.thinking))
        for name, task in (tasks or {}).items()
    ] or [Validation()]
    with models.PARSING:
        subject = models.open_subject(path, step=step, weights=weights, trust=trust)
        subject.template = models.chat_template(subject.trainer.dataset) if tasks else None
    return evaluation.evaluate(subject, chosen, limit=limit, predictions=None, show=lambda topic, detail: None)
