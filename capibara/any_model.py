"""Opens a model to use it, whatever it comes in: a run folder of ours, a Hugging Face folder or a .gguf file.

What it gives is a run (`run_folder.Loaded`) in every case, so that all that works on runs works on foreign models.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from capibara import config
from capibara.interop import checkpoint, gin_of, hf_config
from capibara.models import api
from capibara.training import run_folder
from capibara.training.run_folder import Loaded, Placed
from capibara.training.trainer import Trainer
from capibara.types import UserError


class Opened(NamedTuple):
    """A model that is ready.

    Attributes:
      run: its run, the model without adapters, and the parameters.
      path: where it was.
      step: of a run's checkpoint; None: it is foreign.
      weights: "ema" or "raw" of a run, "stored" of a foreign model.
    """

    run: Loaded
    path: str
    step: int | None
    weights: str


def load(
    path: str,
    gin_files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    *,
    step: int | None = None,
    weights: str | None = None,
    placed: Placed = run_folder.on_one_device,
) -> Opened:
    """Parses the model's own configuration, then `gin_files` and `bindings`, and reads its parameters.

    A foreign model's run is what `convert --format=capibara` would write: rows of 1024 places (Dataset.length), the
    standard library as data, its own tokenizer.

    Args:
      path: of the model.
      gin_files, bindings, search_paths: as of config.parse.
      step: of a run's checkpoint; None: the newest.
      weights: of a run: "ema" or "raw"; None: averages where some were kept.
      placed: where the parameters shall lie.

    Raises:
      UserError: it is no model, or not whole, or has no such step or weights.
    """
    given = (gin_files, bindings, search_paths)
    if run_folder.is_run(path):
        average = None if weights is None else weights == "ema"
        found, run, averaged = run_folder.load_step(path, *given, step=step, average=average, placed=placed)
        return Opened(run, path, found, "ema" if averaged else "raw")
    for flag, value in (("--step", step), ("--weights", weights)):
        if value is not None:
            raise UserError(f"{flag}={value} is of run folders, and {path} is none: leave it out")
    return Opened(_foreign(path, *given, placed), path, None, "stored")


def _foreign(
    path: str, gin_files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str], placed: Placed
) -> Loaded:
    foreign = checkpoint.open_model(path)
    model_config = hf_config.from_hf(foreign.config)
    longest = hf_config.text_part(foreign.config).get("max_position_embeddings")
    if isinstance(model_config, api.DecoderConfig) and model_config.max_length is None:
        model_config = dataclasses.replace(model_config, max_length=longest)
    folder = path if os.path.isdir(path) else _unpacked(foreign.tokenizer)
    with tempfile.NamedTemporaryFile("w", suffix=".gin") as file:
        file.write(gin_of.run(model_config, folder, foreign.tokenizer))
        file.flush()
        config.parse([file.name, *gin_files], bindings, search_paths)
    trainer = config.build(Trainer)
    model = api.build(dataclasses.replace(trainer.model, lora=None))
    return Loaded(trainer, model, checkpoint.loader(path, model)(_target(trainer, model, placed)))


def _target(trainer: Trainer, model: api.Model, placed: Placed):
    return run_folder.with_shardings(model.abstract_params, placed(trainer, model))


def _unpacked(tokenizer: dict[str, bytes]) -> str:
    """A folder with these files, until this process ends: tokenizers are read when they are needed."""
    folder = tempfile.mkdtemp(prefix="capibara-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in tokenizer.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    return folder
