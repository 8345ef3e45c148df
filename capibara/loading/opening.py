"""Loads models for inference, conversion and evaluation: run folders, Hugging Face folders, .gguf files."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping

import jax

from capibara import config
from capibara.core import limits
from capibara.core.fields import in_home
from capibara.core.types import UserError
from capibara.data.tokenizers import files, model_rows
from capibara.data.tokenizers.files import MODEL_FILE, TOKENIZER_FILE
from capibara.interop import gin_of, open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.open_model import ForeignModel, LoadedModel, Training
from capibara.models import api
from capibara.training import run_folder
from capibara.training.run_folder import Placed, TrainedRun, origin
from capibara.training.trainer import Trainer

# A foreign model may support much longer rows, but the cache of each row needs memory for its whole length.
_LENGTHS: Mapping[type[api.TransformerConfig], int] = {api.EncoderDecoderConfig: 512}
_LENGTH = 2048
_LARGEST_OF_BYTES = 512  # a model with a smaller vocabulary and without a tokenizer is assumed to read bytes


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model whose own configuration is known, and whose parameters are not read yet.

    Attributes:
      path: as the user wrote it.
      record: the model's own configuration; Gin files and flags come after it.
      foreign: the model, if it is not of a run folder.
    """

    path: str
    record: config.Recorded
    foreign: ForeignModel | None = None

    def load(
        self,
        trainer: Trainer,
        *,
        step: int | None = None,
        weights: str | None = None,
        placed: Placed = run_folder.on_one_device,
    ) -> LoadedModel:
        """Reads the parameters.

        Args:
          trainer: what `record` configures, with what the user set.
          step, weights: as for `open_path`.
          placed: shardings of the parameters.

        Raises:
          UserError: it is incomplete, or has no such step or weights.
        """
        if self.foreign is None:
            average = None if weights is None else weights == "ema"
            run = run_folder.load(self.path, trainer, step=step, average=average, placed=placed)
            return of_run(run, self.path)
        return dataclasses.replace(_foreign(self.foreign, self.record.where, trainer, placed), path=self.path)


def open_path(
    path: str, *, step: int | None = None, weights: str | None = None, trust: bool = False, dtype: str | None = None
) -> Opened:
    """Opens a run folder or a foreign model.

    A foreign model's configuration is similar to that of `convert --format=capibara`, with the standard library as data;
    its parameters and computations are in bfloat16, on CPUs in float32.

    Args:
      path: path of the model.
      step: a checkpoint step of a run; None: the newest.
      weights: weights of a run, "ema" or "raw"; None: the averages if there are any.
      trust: whether to import the modules that a run's configuration names.
      dtype: in which a foreign model computes; None: that of this machine's devices, which starts JAX.

    Raises:
      UserError: it is not a model, has no tokenizer, or is no run and has no steps and weights to choose from.
    """
    path = in_home(path)
    if is_run(path):
        return Opened(path, run_folder.recorded(path, trust=trust))
    local = open_model.local_model(path)
    known = ("config.json", "adapter_config.json")  # the error of open_model explains how to merge an adapter
    if os.path.exists(os.path.join(local, run_folder.CONFIG)) and not os.path.exists(
        os.path.join(local, "config.json")
    ):
        raise UserError(
            f"{local} holds no checkpoint yet: train it first; where its {run_folder.CONFIG} is T5X's, capibara convert "
            "takes it in"
        )
    if os.path.isdir(local) and not any(os.path.exists(os.path.join(local, name)) for name in known):
        raise UserError(f"{local} is neither a run folder (config.gin) nor a Hugging Face folder (config.json)")
    for flag, value in (("--step", step), ("--weights", weights)):
        if value is not None:
            raise UserError(f"{flag}={value} is only for run folders, and {local} is none: leave it out")
    foreign = open_model.open_model(local)
    return Opened(path, _record(foreign, local, dtype or dtype_of_devices()), foreign)


def is_run(path: str) -> bool:
    """Whether a path is a run folder."""
    return not path.endswith(".gguf") and run_folder.is_run(path)


def of_run(run: TrainedRun, folder: str) -> LoadedModel:
    """A run of a folder as a loaded model."""
    trainer, came_with = run.trainer, origin.read(folder)
    return LoadedModel(
        model=run.model,
        params=run.params,
        dataset=trainer.dataset,
        path=folder,
        step=run.step,
        weights="ema" if run.is_average else "raw",
        origin=came_with,
        like=hf_config.kept_by_run(came_with.get(MODEL_FILE, b"{}")),
        training=Training(
            trainer.init_from, trainer.init_with, trainer.optimizer, trainer.steps, trainer.checkpointing
        ),
    )


def dtype_of_devices() -> str:
    """The dtype in which a foreign model computes on this machine's devices."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"  # bfloat16 is slow on CPUs


def _record(foreign: ForeignModel, path: str, dtype: str) -> config.Recorded:
    """The configuration of a foreign model: a run that would train it."""
    model = hf_config.from_hf(foreign.config, dtype=dtype)
    longest = hf_config.longest(foreign.config)
    if isinstance(model, api.DecoderConfig) and model.max_length is None:
        model = dataclasses.replace(model, max_length=longest)
    if not foreign.tokenizer and model.vocab_size > _LARGEST_OF_BYTES:
        raise UserError(f"{path} has no tokenizer ({TOKENIZER_FILE}, tokenizer.model): put the model's own beside it")
    if not foreign.tokenizer:
        logging.getLogger(__name__).warning(
            "%s has no tokenizer: texts are read as UTF-8 bytes (@ByteVocabulary())", path
        )
    folder = path if os.path.isdir(path) else _written(foreign.tokenizer)
    length = min(model.max_length or _LENGTH, _LENGTHS.get(type(model), _LENGTH))
    _tell_unread_generation(folder, path)
    return config.Recorded(gin_of.run(model, folder, foreign.tokenizer, length), path)


def _tell_unread_generation(folder: str, path: str) -> None:
    if unread := files.unread_generation(folder):
        shown = limits.shortened(", ".join(f"{name} = {value}" for name, value in unread.items()), 200)[1:-1]
        logging.getLogger(__name__).warning(
            "%s: %s has %s, which is not used: requests, flags and Sampling say how texts are sampled",
            path,
            files.GENERATION_FILE,
            shown,
        )


def _foreign(foreign: ForeignModel, path: str, trainer: Trainer, placed: Placed) -> LoadedModel:
    model = api.build(dataclasses.replace(trainer.model, lora=None))
    if model.config.has_gates:
        raise UserError(
            f"StreamingHeads.heads is None, and {path} has no gates: set heads, or DecoderConfig.streaming = @read_streaming_heads()"
        )
    shardings = placed(trainer.plan, model)
    if foreign.tokenizer:
        model_rows.check_vocabulary(trainer.dataset.get_vocabulary(), model.config.vocab_size, path)
    params = open_model.load_params(foreign, model, shardings, dtype=jax.numpy.dtype(model.config.dtype))
    return LoadedModel(model, params, trainer.dataset, path, None, "stored", like=foreign.config)


def _written(contents: Mapping[str, bytes]) -> str:
    """Writes these files to a temporary folder that lasts until this process ends: tokenizers are read on first use."""
    folder = tempfile.mkdtemp(prefix="capibara-tokenizer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in contents.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    return folder
