"""Gin files that name a model, `MODEL = "folder or owner/name"`, in the place of a file of models/."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from capibara import config
from capibara.core.types import Dataclass, UserError
from capibara.interop import hub

if TYPE_CHECKING:
    from capibara.data.tokenizers.vocabulary import Vocabulary
    from capibara.models.api import TransformerConfig
    from capibara.training.trainer import Trainer

MODEL, TEACHER = "MODEL", "TEACHER"
# Before the processes of a run are joined JAX must not be started, which would say on what devices it is: until then this.
UNKNOWN_DTYPE = "bfloat16"
_FILLED = ("INIT_FROM", "TOKENIZER")  # macros that are the model, where a file requires them and nobody gives them


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """What a run takes from a model.

    Attributes:
      path: where it lies on this machine.
      model: its configuration, without adapters.
      vocabulary: its tokenizer.
      is_adapter: whether the path is a folder of PEFT, whose adapters are merged into their base.
      length: tokens of a row that it reads at most; None: any number.
    """

    path: str
    model: TransformerConfig
    vocabulary: Vocabulary
    is_adapter: bool = False

    @property
    def length(self) -> int | None:
        return self.model.max_length

    @property
    def tokenizer(self) -> str:
        """The folder of the tokenizer: the model's own, or of a copy for a model that is one file."""
        return str(getattr(self.vocabulary, "path", self.path))


def read(path: str, dtype: str | None = None) -> Pretrained:
    """Reads the configuration and tokenizer of a model, and none of its weights; clears all bindings.

    Args:
      path: a run folder, a Hugging Face folder, a .gguf file, a folder of PEFT that names its base, or the name of one of these
        on the Hugging Face Hub.
      dtype: as for `opening.open_path`; with one JAX is not started.

    Raises:
      UserError: there is no such model, or it is of no kind that capibara has.
    """
    from capibara.loading import opening
    from capibara.training.run_folder import own_tokenizer
    from capibara.training.trainer import Trainer

    path = hub.local_path(path)
    opened = opening.open_path(path, dtype=dtype)
    config.parse((), (), (), opened.record)
    trainer = config.build(Trainer)
    if opened.foreign is None:
        trainer = own_tokenizer.of_run(trainer, opened.path)
    model = dataclasses.replace(trainer.model, lora=None)
    return Pretrained(path, model, trainer.dataset.get_vocabulary(), opened.adapter is not None)


def parse(
    gin_files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str], dtype: str | None = None
) -> list[pathlib.Path]:
    """`config.parse`, of files that may bind MODEL or TEACHER: their sizes are bound before all files, which may change them.

    Where the files require INIT_FROM or TOKENIZER, and nobody gives them, they are the model's.

    Args:
      gin_files, bindings, search_paths: as for `config.parse`.
      dtype: as for `read`.

    Returns:
      The files that were read.

    Raises:
      UserError: as `config.parse` and `read`; or MODEL or TEACHER is empty.
    """
    files = config.parse(gin_files, bindings, search_paths, of_readers=(MODEL, TEACHER))
    paths = {
        name: path for name in (MODEL, TEACHER) if isinstance(path := config.macro(name), str)
    }  # T5X's MODEL is none
    for name, path in paths.items():
        if not path:
            raise UserError(
                f"{name} is empty, must be a folder, a file or a name: try {name} = 'HuggingFaceTB/SmolLM2-135M'"
            )
    if not paths:
        return files
    missing = [name for name in _FILLED if config.macro(name) is config.REQUIRED] if MODEL in paths else []
    models = {name: read(path, dtype) for name, path in paths.items()}
    texts, values = [], {}
    if (student := models.get(MODEL)) is not None:
        texts, values = [_text(student)], {"INIT_FROM": student.path, "TOKENIZER": student.tokenizer}
    if (teacher := models.get(TEACHER)) is not None:
        texts.append(_text_of_teacher(teacher))
    config.parse(
        gin_files,
        [*bindings, *(f"{name} = {values[name]!r}" for name in missing)],
        search_paths,
        config.Recorded("".join(texts), " and ".join(paths.values())),
        of_readers=(MODEL, TEACHER),
    )
    return files


def built(
    gin_files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str], dtype: str | None = None
) -> Trainer:
    """The run that files and bindings describe; arguments and errors as for `parse`."""
    from capibara.training.trainer import Trainer

    parse(gin_files, bindings, search_paths, dtype)
    return config.build(Trainer)


def _text(pretrained: Pretrained) -> str:
    from capibara.config import written

    lines = [*written.bindings(pretrained.model), f"Trainer.model = @{type(pretrained.model).__name__}()"]
    lines += ["Trainer.init_with = 'merged'"] if pretrained.is_adapter else []
    return "\n".join([*lines, *written.bindings(pretrained.vocabulary)]) + "\n"


def _text_of_teacher(pretrained: Pretrained) -> str:
    from capibara.config import written

    scope = TEACHER.lower()
    parts: dict[str, Dataclass] = {"model": pretrained.model, "vocabulary": pretrained.vocabulary}
    lines = [line for part in parts.values() for line in written.bindings(part, scope)]
    lines += [f"Teacher.{name} = @{scope}/{type(part).__name__}()" for name, part in parts.items()]
    return "\n".join([*lines, f"Teacher.path = {pretrained.path!r}", "Distillation.teacher = @Teacher()"]) + "\n"
