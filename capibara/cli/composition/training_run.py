"""Trains the run that Gin files or Python code describe: what `capibara train` and `capibara.train` share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capibara.core.types import Dataclass, UserError
from capibara.multihost import joining

if TYPE_CHECKING:
    from capibara.config.written import Difference
    from capibara.data.dataset import Dataset
    from capibara.interop import open_model
    from capibara.interop import peft_runs as runs
    from capibara.models.api import Model
    from capibara.run.run import Run
    from capibara.training.loop import Outcome
    from capibara.training.trainer import Trainer


def train(
    trainer: Trainer,
    *others: Dataclass,
    emulate: int | None = None,
    start_over: bool = False,
    joined: joining.Joining = joining.Joining(),
    settled: Callable[[], Trainer] | None = None,
) -> Outcome:
    """Trains a run that Python code describes, as `capibara train` trains one of a Gin file: `capibara.train(trainer)`.

    Args:
      trainer, others, emulate, start_over, joined: as for `capibara.train`.
      settled: the run once its devices are known, in the place of `trainer`; None: the same.

    Raises:
      UserError: the run cannot be trained as described, or Gin text cannot hold a value.
    """
    from capibara import config
    from capibara.config import written
    from capibara.run.run import Run
    from capibara.training.trainer import Trainer

    if type(trainer) is not Trainer:
        raise UserError(
            f"cb.train is given a {type(trainer).__name__}, must be given a cb.Trainer: cb.train(cb.Trainer(...))"
        )
    if emulate is not None and type(emulate) is not int:
        raise UserError(f"emulate is {emulate!r}, must be a number of devices, or None: try 8")
    config.parse((), written.text_of(trainer, *others).split("\n"))
    built = config.build(Trainer)
    _join(built, emulate, joined)
    if settled is not None:
        trainer = settled()
        config.parse((), written.text_of(trainer, *others).split("\n"))
        built = config.build(Trainer)
    read, by_type = parts_of(built), {type(part): part for part in (trainer, *others)}
    parts = {name: by_type.get(type(part), part) for name, part in read.items()}
    for name, part in parts.items():
        written.check_same(read[name], part)
    notes = [
        f"{name} is of this script: only this process can read the run folder, unless a module of yours defines it"
        for name in written.unnamed(trainer, *others)
    ]
    return _train(Run(**parts), emulate, start_over=start_over, notes=notes)


def train_gin(
    gin_files: Sequence[str],
    bindings: Sequence[str],
    search_paths: Sequence[str],
    emulate: int | None,
    *,
    start_over: bool = False,
    joined: joining.Joining = joining.Joining(),
    check: bool = False,
    explain: bool = False,
) -> Outcome:
    """Trains the run that Gin files and bindings describe.

    Args:
      gin_files, bindings, search_paths, emulate, start_over, joined: as in config.parse and `train`.
      check: only check what was given, and print what was checked: nothing is compiled or written.
      explain: print where each value comes from that is no default.

    Raises:
      UserError: the run cannot be trained as described.
    """
    from capibara import config
    from capibara.cli.composition import pretrained
    from capibara.run.run import Run

    trainer = pretrained.built(gin_files, bindings, search_paths, pretrained.UNKNOWN_DTYPE)
    _join(trainer, emulate, joined)
    if isinstance(config.macro(pretrained.MODEL), str):
        trainer = pretrained.built(gin_files, bindings, search_paths)
    return _train(Run(**parts_of(trainer)), emulate, start_over=start_over and not check, check=check, explain=explain)


def parts_of(trainer: Trainer) -> dict[str, Any]:
    """The parts of a run that the parsed configuration describes; what has no effect is not built, so that it is told."""
    from capibara import config
    from capibara.evaluation.seqio_tasks import SeqioEvaluation
    from capibara.inference.engine.engine import EngineConfig
    from capibara.inference.sample import SampleText
    from capibara.monitoring.dashboard.settings import DashboardConfig
    from capibara.monitoring.defaults import Monitoring
    from capibara.monitoring.system.sampler import SystemMetrics
    from capibara.monitoring.trackers.tracking import Tracking

    kinds: dict[str, type] = {
        "samples": SampleText,
        "monitoring": Monitoring,
        "system": SystemMetrics,
        "tracking": Tracking,
    }
    if trainer.dashboard:
        kinds["dashboard"] = DashboardConfig
    if trainer.evaluation.task_metrics:
        kinds |= {"tasks": SeqioEvaluation, "batching": EngineConfig}
    return {"trainer": trainer} | {name: config.build(kind) for name, kind in kinds.items()}


def _train(
    run: Run,
    emulate: int | None,
    *,
    start_over: bool,
    notes: Sequence[str] = (),
    check: bool = False,
    explain: bool = False,
) -> Outcome:
    """Trains a run that was read; prints the notes first."""
    import jax

    from capibara import config
    from capibara.cli.composition import options, retrieving
    from capibara.inference.sample import sampler
    from capibara.models import api
    from capibara.multihost import hosts
    from capibara.planner.hardware import chips, xla_flags
    from capibara.training import loop, run_folder, setup

    run, changed = _on_devices(run, emulate, start_over=start_over)
    trainer, dataset, chip = run.trainer, run.trainer.dataset, jax.devices()[0].device_kind
    dataset.preload()
    model = api.build(trainer.model)
    callbacks, judge = run.callbacks(dashboard=trainer.dashboard and not check), run.judge(model)
    _print([f"note: {line}" for line in (*notes, *config.check_used(trainer.later), *_beginning(dataset))])
    record = config.operative(changed)
    if explain:
        _print(_origins(config.origins(changed, "the planner" if emulate is None else f"--emulate={emulate}")))
    _print(run_folder.changes(trainer.model_dir, record))
    options.check(trainer, run.samples)
    samples = sampler(
        model,
        dataset.get_vocabulary,
        dataset.length,
        run.samples,
        dataset.encoder_length,
        trainer.plan.rules,
        gathered=hosts.gathered,
    )
    check_teacher(trainer)
    trainer = retrieving.with_open_index(trainer)
    load = functools.partial(loader, dataset=trainer.dataset)
    if check:
        _print([f"checked {line}" for line in setup.check(trainer, load)])
        return loop.Outcome(0, "checked")
    return loop.train(
        trainer,
        callbacks,
        sampler=samples,
        judge=judge,
        peak_flops=chips.peak_flops(chip) if trainer.model.dtype == "bfloat16" else None,
        compiler_options=xla_flags.of_plan(chip, trainer.plan),
        config=record,
        load=load,
    )


def _join(trainer: Trainer, emulate: int | None, joined: joining.Joining) -> None:
    """Starts this process's devices, and joins it with the others, whose runs must have the same configuration."""
    from capibara import config
    from capibara.core import devices
    from capibara.multihost import channel
    from capibara.training import checks

    checks.installed(trainer)
    devices.start(emulate)
    facts = {"configuration": config.operative()}  # of the trainer: processes may be watched in different ways
    joining.join(joined, facts, emulated=emulate is not None, heartbeat_s=trainer.heartbeat_s)
    channel.watch()


def _on_devices(run: Run, emulate: int | None, *, start_over: bool) -> tuple[Run, list[Difference]]:
    """Checks the run folder, and fits the run to the devices; returns what that changed, too."""
    import jax

    from capibara.config import written
    from capibara.run.run import emulated, with_own_tokenizer, with_plan
    from capibara.training import checks, initialization, run_folder

    trainer = run.trainer
    if start_over:
        run_folder.start_over(trainer.model_dir)
    if jax.process_index() == 0:
        checks.folder(trainer.model_dir)
    run_folder.check_resumable(trainer.model_dir)
    initialization.check_there(trainer)
    run = with_own_tokenizer(run)
    fitted, title = with_plan(run) if emulate is None else emulated(run, jax.device_count())
    changed = written.differences(run.trainer, fitted.trainer)
    _print(["\n  ".join([title, *(item.line for item in changed)])] if title else [])
    return fitted, changed


def _origins(origins: Mapping[str, tuple[str, str]]) -> list[str]:
    """A line for each value with its origin, in columns."""
    from capibara.core.limits import shortened

    bindings = {name: f"{name} = {shortened(value, 60)[1:-1]}" for name, (value, _) in origins.items()}
    width = max(map(len, bindings.values()), default=0)
    return [f"{bindings[name]:<{width}}  {where}" for name, (_, where) in sorted(origins.items())]


def _print(lines: Sequence[str]) -> None:
    import jax

    print(*(f"{line}\n" for line in lines if jax.process_index() == 0), sep="", end="")


def _beginning(dataset: Dataset) -> list[str]:
    """How texts begin, if the tokenizer decides it, and not a chat template or an encoder-decoder's inputs."""
    rendered = getattr(dataset.source, "template", None) is not None
    if rendered or dataset.vocabulary is None or dataset.encoder_length is not None:
        return []
    with contextlib.suppress(UserError):  # a tokenizer that cannot be read is an error of the checks that follow
        return [note] if (note := dataset.vocabulary.beginning()) else []
    return []


def loader(path: str, model: Model, merge: bool, *, dataset: Dataset) -> open_model.Loader | runs.Loader:
    """The reader of a foreign model of initial weights; prints a note if its tokenizer is not that of the data.

    Args:
      path, model, merge: as in peft_runs.loader.
      dataset: of the run.

    Raises:
      UserError: as peft_runs.loader; or it is an adapter of a run.
    """
    from capibara.interop import peft_runs as runs
    from capibara.training import run_folder

    if runs.is_adapter(path) and run_folder.is_run(base := runs.base_of(path, None)):
        raise UserError(
            f"{path} is an adapter of the run {base}, from which no training begins: merge it first, capibara convert "
            f"--from={path} --to=NEW, and begin from NEW"
        )
    read = runs.loader(path, model, merge)
    _print(_other_tokenizer(path, read.base if isinstance(read, runs.Loader) else read, dataset))
    return read


def check_teacher(trainer: Trainer) -> None:
    """Raises UserError unless a teacher has the tokens of the run's tokenizer."""
    from capibara.interop.merge import tokenizers
    from capibara.strategies.distillation.loss import Distillation

    teacher, vocabulary = getattr(trainer.loss, "teacher", None), trainer.dataset.vocabulary
    if (
        not isinstance(trainer.loss, Distillation)
        or teacher is None
        or teacher.vocabulary is None
        or vocabulary is None
    ):
        return
    files, theirs = vocabulary.own_files().files, teacher.vocabulary.own_files().files
    tokens, named = tokenizers.tokens_of(files, "Dataset.vocabulary"), tokenizers.tokens_of(theirs, teacher.path)
    other = tokenizers.difference(named, tokens)
    if not tokens or not named:
        same = teacher.vocabulary.fingerprint() == vocabulary.fingerprint()
        other = (
            None if same else f"{type(teacher.vocabulary).__name__} and {type(vocabulary).__name__} have other tokens"
        )
    if other:
        raise UserError(
            f"Distillation.teacher ({teacher.path}) has another tokenizer than Dataset.vocabulary: {other}; take a teacher with "
            "the student's tokenizer"
        )


def _other_tokenizer(path: str, read: open_model.Loader, dataset: Dataset) -> list[str]:
    """A note if the initial weights come with another tokenizer than the run's: their rows are of other tokens."""
    from capibara.interop.merge import tokenizers

    if (vocabulary := dataset.vocabulary) is None:  # a SeqIO task's
        return []
    ours, theirs = vocabulary.own_files().files, read.foreign.tokenizer
    if theirs.items() <= ours.items():  # the usual case, without reading them
        return []
    known, named = tokenizers.tokens_of(ours, "Dataset.vocabulary"), tokenizers.tokens_of(theirs, path)
    result = tokenizers.difference(named, known) if known else f"{type(vocabulary).__name__} has no such tokens"
    if not named or not result:
        return []
    return [f"note: the tokenizer of Trainer.init_from ({path}) is another than Dataset.vocabulary: {result}"]
