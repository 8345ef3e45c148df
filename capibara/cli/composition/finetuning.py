"""Fine-tuning in one call: the Gin files and bindings that a model, its data and a method stand for."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from capibara.cli.composition import pretrained
from capibara.core import fields, limits
from capibara.core.types import UserError
from capibara.data.chat import formats

if TYPE_CHECKING:
    from capibara.cli.composition.pretrained import Pretrained

_LENGTH = 1024  # tokens of a row, if the model reads so many
_LONG = 8192  # of one with passkeys
_PAIR = 1536  # of one with a prompt twice, and its own answers
_MOST_BATCHES = 100_000  # of a pass whose steps are counted
_PARTS = 5  # evaluations and checkpoints of a run


class Method(enum.StrEnum):
    """What is trained, and by which loss.

    LORA: adapters, on texts or chats. QLORA: the same on a base in 4 bits. FULL: all weights. DISTILL: adapters, on a teacher's
    next-token distributions for texts or chats. DUO_ATTENTION: gates of heads that retrieve or stream, on passkeys in texts. DPO, ORPO, SIMPO, CPO: adapters, on pairs of a chosen and a rejected answer.
    KTO: adapters, on answers with a label. REWARD: adapters and a head that scores answers, on pairs. PROCESS_REWARD: the same
    for steps, on solutions whose steps have labels. GRPO, DR_GRPO, DAPO, GSPO, CISPO, SAPO, RLOO, REINFORCE_PP, PPO: adapters, on
    the model's own answers and their rewards. ONLINE_DPO: the same, on pairs of them that rewards rank.
    """

    LORA = "lora"
    QLORA = "qlora"
    FULL = "full"
    DISTILL = "distill"
    DUO_ATTENTION = "duo_attention"
    DPO = "dpo"
    ORPO = "orpo"
    SIMPO = "simpo"
    CPO = "cpo"
    KTO = "kto"
    REWARD = "reward"
    PROCESS_REWARD = "process_reward"
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    DAPO = "dapo"
    GSPO = "gspo"
    CISPO = "cispo"
    SAPO = "sapo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce_pp"
    PPO = "ppo"
    ONLINE_DPO = "online_dpo"

    @property
    def is_rewarded(self) -> bool:
        """Whether it trains on the model's own answers and their rewards."""
        return _OF_LOSS.get(self) is Kind.PROMPTS


class Kind(enum.StrEnum):
    """What a line of the data holds."""

    TEXT = "text"
    CHAT = "chat"
    PREFERENCES = "preferences"
    UNPAIRED = "unpaired"
    PROMPTS = "prompts"
    STEPS = "steps"


# Gin files of a run without a loss; others have what adapters add, and then the loss, whose defaults win.
_RUNS = {Method.LORA: ("runs/lora.gin",), Method.QLORA: ("runs/lora.gin",), Method.FULL: ("runs/full.gin",)}
_RUNS |= {Method.DUO_ATTENTION: ("runs/duo_attention.gin",)}
_TASKS = {
    Kind.TEXT: "tasks/jsonl.gin",
    Kind.CHAT: "tasks/chat.gin",
    Kind.PREFERENCES: "tasks/preferences.gin",
    Kind.UNPAIRED: "tasks/unpaired.gin",
    Kind.PROMPTS: "tasks/prompts.gin",
    Kind.STEPS: "tasks/steps.gin",
}
_OWN = {  # binding -> the option
    "MODEL": "model",
    "MODEL_DIR": "out",
    "Trainer.model_dir": "out",
    "FILES": "data",
    "VALIDATION_FILES": "eval",
    "TEACHER": "teacher",
    "TRAIN_STEPS": "steps",
    "Trainer.steps": "steps",
}
_REWARDED = (
    *(Method.GRPO, Method.DR_GRPO, Method.DAPO, Method.GSPO),
    *(Method.CISPO, Method.SAPO, Method.RLOO, Method.REINFORCE_PP, Method.PPO, Method.ONLINE_DPO),
)
_OF_LOSS = {
    **dict.fromkeys((Method.DPO, Method.ORPO, Method.SIMPO, Method.CPO, Method.REWARD), Kind.PREFERENCES),
    Method.KTO: Kind.UNPAIRED,
    Method.PROCESS_REWARD: Kind.STEPS,
    **dict.fromkeys(_REWARDED, Kind.PROMPTS),
}
_KEYS = {
    Kind.PREFERENCES: "'chosen' and 'rejected'",
    Kind.UNPAIRED: "a 'label', true or false",
    Kind.STEPS: "'steps' and 'labels'",
}
_NOUNS = {
    Kind.PREFERENCES: "pairs of answers",
    Kind.UNPAIRED: "answers with labels",
    Kind.STEPS: "labelled steps",
}
_OTHER_METHOD = {
    Kind.PREFERENCES: "set method = 'dpo', or leave the rejected answers out",
    Kind.UNPAIRED: "set method = 'kto', or leave label and the undesirable answers out",
    Kind.STEPS: "set method = 'process_reward'",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuning:
    """A fine-tuning as a user names it; None: the default of the method and the model's size.

    Attributes:
      model: the model that it begins from, as for `pretrained.read`.
      files: JSON lines with the data; a folder stands for the files in it. Parquet and CSV files, and data sets of the Hugging
        Face Hub (OWNER/NAME, OWNER/NAME:SPLIT, OWNER/NAME:CONFIG:SPLIT), are written as such into the run folder.
      out: the run folder.
      method: what is trained, and how.
      teacher: of method "distill", as for `pretrained.read`; None: a binding of Distillation.stored takes its place.
      validation_files: for evaluations; empty: a part of `files` is held out.
      steps: at which the run ends; None: those of `epochs`.
      epochs: passes over the data; None: one.
      learning_rate: the highest one; None: see `learning_rate`.
      batch_size: rows of a batch.
      length: tokens of a row; None: 1024 (of duo_attention 8192), or what the model reads.
      seed: of adapters and of the data's order.
      gin_files: Gin files after those of the method.
      bindings: Gin bindings after all others.
      search_paths: folders of Gin files.
    """

    model: str
    files: tuple[str, ...]
    out: str
    method: Method = Method.LORA
    teacher: str | None = None
    validation_files: tuple[str, ...] = ()
    steps: int | None = None
    epochs: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    length: int | None = None
    seed: int = 0
    gin_files: tuple[str, ...] = ()
    bindings: tuple[str, ...] = ()
    search_paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fields.check(self)
        for binding in self.bindings:
            name = binding.partition("=")[0].strip()
            if name in _OWN:
                raise UserError(
                    f"{name} is bound by {binding!r}, and is an option of its own: set {_OWN[name]} in its place"
                )
        if self.steps is not None and self.epochs is not None:
            raise UserError(f"steps ({self.steps}) and epochs ({self.epochs}) exclude each other: leave one out")
        for name in ("steps", "epochs", "batch_size", "length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} ({value}) must be at least 1: leave it out for the default")
        stored = any(binding.partition("=")[0].strip() == "Distillation.stored" for binding in self.bindings)
        if self.method is Method.DISTILL and self.teacher is None and not stored:
            raise UserError(
                "teacher has no value, which method 'distill' learns from: name a model, such as runs/large"
            )
        if self.teacher is not None and self.method is not Method.DISTILL:
            raise UserError(
                f"teacher is {self.teacher!r}, and method is {str(self.method)!r}: set method = 'distill', or leave teacher out"
            )
        if not self.files:
            raise UserError("the data is empty: name a file of JSON lines, such as chats.jsonl")
        if not self.out.strip():
            raise UserError("out is empty: name the run folder, such as runs/mine")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A fine-tuning as Gin has it: `capibara train` of these files and bindings is the same run.

    Attributes:
      gin_files, bindings, search_paths: as in config.parse.
      notes: lines on what was chosen.
    """

    gin_files: tuple[str, ...]
    bindings: tuple[str, ...]
    search_paths: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command line of the same run."""
        import shlex

        gin_files = [f"--gin_file={name}" for name in self.gin_files]
        values = [
            f"--gin.{name.strip()}={value.strip()}" for name, _, value in (b.partition("=") for b in self.bindings)
        ]
        folders = [f"--gin_search_paths={path}" for path in self.search_paths]
        return shlex.join(["python", "-m", "capibara.train", *gin_files, *folders, *values])


def choose(asked: FineTuning, show: Callable[[str, str], None] = lambda topic, detail: None) -> Chosen:
    """Chooses what was not named; clears all bindings.

    Args:
      asked: what was named.
      show: reports the progress.

    Raises:
      UserError: there is no such model or data, or the data is of another kind than the method reads.
    """
    from capibara.models.api import DecoderConfig

    check_out(asked.out, asked.model)
    asked = _with_tables(asked, show)
    model = pretrained.read(asked.model, pretrained.UNKNOWN_DTYPE)
    if not isinstance(model.model, DecoderConfig):
        raise UserError(
            f"model {asked.model} is a {type(model.model).__name__}, must be a decoder: see docs/training.md for the others"
        )
    kind = _kind(asked)
    most = {Method.DUO_ATTENTION: _LONG, Method.ONLINE_DPO: _PAIR}.get(
        asked.method, 768 if asked.method.is_rewarded else _LENGTH
    )
    length = asked.length or min(most, model.length or most)
    bindings = {
        pretrained.MODEL: model.path,
        "MODEL_DIR": asked.out,
        "FILES": asked.files,
        "LENGTH": length,
        "LEARNING_RATE": learning_rate(asked.method, model) if asked.learning_rate is None else asked.learning_rate,
        "BATCH_SIZE": asked.batch_size or _rows(asked.method),
    }
    if asked.validation_files:
        bindings["VALIDATION_FILES"] = asked.validation_files
    if asked.teacher is not None:
        bindings["TEACHER"] = asked.teacher
    if asked.method is Method.DISTILL:
        bindings["ANSWER_LENGTH"] = max(1, length // 4)
    if asked.method.is_rewarded:
        texts = 2 if asked.method is Method.ONLINE_DPO else 1  # of a row
        bindings["ANSWER_LENGTH"] = max(1, 2 * length // (3 * texts))
    if asked.seed:
        bindings |= {"Trainer.seed": asked.seed, "Dataset.seed": asked.seed}
    lines = [f"{name} = {_literal(value)}" for name, value in bindings.items()]
    if kind is Kind.TEXT:
        lines += [f"Dataset.vocabulary = @{type(model.vocabulary).__name__}()", *_written(model.vocabulary)]
    if asked.method is Method.QLORA:
        lines += ["Lora.base_dtype = 'nf4'", "Lora.double_quantization = True"]
    of_mtp = _without_mtp_loss(asked.method, model) if model.model.mtp_windows else {}
    chosen = Chosen(
        (_TASKS[kind], *_runs(asked.method), *asked.gin_files),
        (*lines, *of_mtp, *asked.bindings),
        asked.search_paths,
        tuple(of_mtp.values()),
    )
    return _with_steps(asked, chosen, show)


def _with_tables(asked: FineTuning, show: Callable[[str, str], None]) -> FineTuning:
    """With data sets of the Hub and other tables as files in the run folder."""
    from capibara.data.shards import tables
    from capibara.data.text.splits import Use

    folder = os.path.join(asked.out, "data")
    files = tables.with_tables(asked.files, folder, show)
    validation = tables.with_tables(asked.validation_files, folder, show, Use.VALIDATION)
    if not asked.validation_files:
        validation = tables.held_out(asked.files, folder, show)
    return dataclasses.replace(asked, files=files, validation_files=validation)


def check_out(out: str, model: str) -> None:
    """Raises UserError if a run would be written into the folder of the model that it starts from."""
    if os.path.isdir(out) and os.path.isdir(model) and os.path.samefile(out, model):
        raise UserError(f"out ({out}) is the folder of the model: name a new one, such as runs/mine")


def learning_rate(method: Method, model: Pretrained) -> float:
    """The highest learning rate of a method for a model of this size, as published.

    Adapters: 2e-4 up to 13 B parameters, 1e-4 above (Dettmers et al. 2023, arXiv:2305.14314, table 9). All weights: 2e-5 up to
    7 B, 1e-5 above (Stanford Alpaca, 2023). Gates: 0.02 (arXiv:2410.10819). Adapters with another loss: as the comments of its file in gin/runs have it.
    """
    from capibara.models import api

    count = api.build(model.model).param_count
    if method is Method.DUO_ATTENTION:
        return 0.02
    if method is Method.FULL:
        return 2e-5 if count < 8e9 else 1e-5
    if method not in _OF_LOSS:
        return 2e-4 if count < 15e9 else 1e-4
    return 2e-5 if method.is_rewarded or method is Method.SIMPO else 1e-4


def _without_mtp_loss(method: Method, model: Pretrained) -> dict[str, str]:
    """Binding -> line on it, of a method whose loss has no multi-token prediction, for a model with modules for it."""
    if method in (Method.LORA, Method.QLORA, Method.FULL):
        return {}
    name = type(model.model).__name__
    if method in (Method.REWARD, Method.PROCESS_REWARD, Method.DUO_ATTENTION):
        return {f"{name}.mtp = None": f"{method} has no multi-token prediction: its modules are left out"}
    return {"Mtp.loss_weight = 0.0": f"{method} has no loss for multi-token prediction: its modules are frozen"}


def _rows(method: Method) -> int:
    """The rows of a batch."""
    if not method.is_rewarded:
        return 8
    return 32 if method is Method.ONLINE_DPO else 64


def _runs(method: Method) -> tuple[str, ...]:
    """The Gin files of a run."""
    return _RUNS.get(method, ("runs/lora.gin", f"runs/{method}.gin"))


def _literal(value: object) -> str:
    """A value as Gin has it; texts in double quotes, which a shell needs no more quotes for."""
    if isinstance(value, tuple):
        return f"({''.join(f'{_literal(item)},' for item in value)})"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _written(part: Any) -> list[str]:
    from capibara.config import written

    return written.bindings(part)


def _with_steps(asked: FineTuning, chosen: Chosen, show: Callable[[str, str], None]) -> Chosen:
    """With the number of steps, and what follows from it."""
    steps, notes = asked.steps, []
    if steps is None:
        if asked.method.is_rewarded:
            name = str(asked.method)
            raise UserError(f"steps has no value: {name} makes its own answers, say how often, such as steps = 200")
        show("counting", "the batches of a pass over the data")
        epochs = asked.epochs or 1
        batches = _batches(chosen)
        steps = epochs * batches
        notes = [f"{steps} steps: {epochs} x {batches} batches of the data"]
    lines = [f"TRAIN_STEPS = {steps}"]
    every = -(-steps // _PARTS)
    lines += [f"Evaluation.every = {every}", "Evaluation.max_batches = 16", f"Checkpointing.every = {every}"]
    lines += [f"Trainer.log_every = {max(1, min(10, steps // 10))}"]
    bound = {line.partition("=")[0].strip() for line in asked.bindings}
    lines = [line for line in lines if line.partition("=")[0].strip() not in bound]
    return dataclasses.replace(chosen, bindings=(*chosen.bindings, *lines), notes=(*chosen.notes, *notes))


def _batches(chosen: Chosen) -> int:
    """The number of batches of a pass over the training data; clears all bindings."""
    from capibara.data.pipeline.loader import make_loader

    bindings = [*chosen.bindings, "TRAIN_STEPS = 1"]
    trainer = pretrained.built(chosen.gin_files, bindings, chosen.search_paths, pretrained.UNKNOWN_DTYPE)
    dataset = dataclasses.replace(trainer.dataset, workers=0)  # how many are best, JAX would have to say
    loader = make_loader(dataset, batch_size=trainer.plan.batch_size, epochs=1)
    try:
        count = 0
        for count, _ in enumerate(loader, 1):
            if count > _MOST_BATCHES:
                raise UserError(
                    f"a pass over the data has more than {_MOST_BATCHES:,} batches: say how many steps you want"
                )
    finally:
        loader.close()
    return max(1, count)


def _kind(asked: FineTuning) -> Kind:
    """What the first line of the data holds, which must be what the method reads."""
    path, record = _first(asked.files)
    wanted = _OF_LOSS.get(asked.method)
    if wanted is Kind.PROMPTS:
        return wanted
    kind = Kind.TEXT if "text" in record and not formats.CHAT_KEYS & record.keys() else Kind.CHAT
    if formats.is_preference(record):
        kind = Kind.PREFERENCES
    elif isinstance(record.get("labels"), list) and {"steps", "completions"} & record.keys():
        kind = Kind.STEPS
    elif kind is Kind.CHAT and isinstance(record.get("label"), bool):
        kind = Kind.UNPAIRED
    fix = f": {_OTHER_METHOD[kind]}" if kind in _OTHER_METHOD else ""
    if wanted is None and fix:
        raise UserError(f"{path} has {_NOUNS[kind]}{fix}")
    if wanted not in (None, kind):
        raise UserError(
            f"{path}: method {str(asked.method)!r} reads lines with {_KEYS[wanted]}, and the first one has "
            f"{_keys(record)}{fix}"
        )
    return kind


def _first(files: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The first line of the data, and its file."""
    from capibara.data.text import disk
    from capibara.storage import packed

    for path in disk.expand("FILES", files, disk.RECORDS):
        for number, line in packed.lines(path):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}:{number} is not JSON ({limits.cause(error)})") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}:{number} must be a JSON object: name a file of objects")
            return os.fspath(path), record
    raise UserError(f"{', '.join(files)} are empty: name a file of JSON lines")


def _keys(record: dict[str, Any]) -> str:
    return limits.shortened(", ".join(map(str, record)))[1:-1]
