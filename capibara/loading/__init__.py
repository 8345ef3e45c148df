"""Loads models for inference, conversion and evaluation: run folders, Hugging Face folders, .gguf files."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence

import jax

from capibara import config
from capibara.core import limits
from capibara.core.fields import in_home
from capibara.core.types import Params, PyTree, UserError
from capibara.data.tokenizers import files, model_rows
from capibara.data.tokenizers.files import MODEL_FILE, TOKENIZER_FILE
from capibara.interop import gin_of, open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.open_model import LoadedModel, Training
from capibara.models import api
from capibara.training import run_folder
from capibara.training.run_folder import Placed, TrainedRun, origin
from capibara.training.trainer import Trainer

# A foreign model may support much longer rows, but the cache of each row needs memory for its whole length.
_LENGTHS: Mapping[type[api.TransformerConfig], int] = {api.EncoderDecoderConfig: 512}
_LENGTH = 2048
_LARGEST_OF_BYTES = 512  # a model with a smaller vocabulary and without a tokenizer is assumed to read bytes


def load(
    path: str,
    gin_files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    *,
    step: int | None = None,
    weights: str | None = None,
    placed: Placed = run_folder.on_one_device,
    trust: bool = False,
) -> LoadedModel:
    """Parses the model's own configuration, then `gin_files` and `bindings`, and reads its parameters.

    A foreign model's configuration is similar to that of `convert --format=capibara`, with the standard library as data;
    its parameters and computations are in bfloat16, on CPUs in float32.

    Args:
      path: path of the model.
      gin_files, bindings, search_paths: as in config.parse.
      step: a checkpoint step of a run; None: the newest.
      weights: weights of a run, "ema" or "raw"; None: the averages if there are any.
      placed: shardings of the parameters.
      trust: whether to import the modules that a run's configuration names.

    Raises:
      UserError: it is not a model, is incomplete, has no tokenizer, or has no such step or weights.
    """
    return load_with_run(
        path, gin_files, bindings, search_paths, step=step, weights=weights, placed=placed, trust=trust
    )[1]


def load_with_run(
    path: str,
    gin_files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    *,
    step: int | None = None,
    weights: str | None = None,
    placed: Placed = run_folder.on_one_device,
    trust: bool = False,
) -> tuple[Trainer, LoadedModel]:
    """Like `load`, and also returns the run, which evaluation needs; for a foreign model, a run that would train it."""
    path, gin = in_home(path), (gin_files, bindings, search_paths)
    if not path.endswith(".gguf") and run_folder.is_run(path):
        average = None if weights is None else weights == "ema"
        run = run_folder.load(path, *gin, step=step, average=average, placed=placed, trust=trust)
        return run.trainer, _of_run(run, path)
    given_path, path = path, open_model.local_model(path)
    known = ("config.json", "adapter_config.json")  # the error of open_model explains how to merge an adapter
    if os.path.exists(os.path.join(path, run_folder.CONFIG)) and not os.path.exists(os.path.join(path, "config.json")):
        raise UserError(
            f"{path} holds no checkpoint yet: train it first; where its {run_folder.CONFIG} is T5X's, capibara convert "
            "takes it in"
        )
    if os.path.isdir(path) and not any(os.path.exists(os.path.join(path, name)) for name in known):
        raise UserError(f"{path} is neither a run folder (config.gin) nor a Hugging Face folder (config.json)")
    for flag, value in (("--step", step), ("--weights", weights)):
        if value is not None:
            raise UserError(f"{flag}={value} is only for run folders, and {path} is none: leave it out")
    config.load_modules(gin_files, search_paths)
    trainer, loaded = _foreign(path, *gin, placed)
    return trainer, dataclasses.replace(loaded, path=given_path)


@dataclasses.dataclass(frozen=True)
class RunFolders:
    """Access to run folders for packages that do not import training (interop.conversion.RunFolders).

    Attributes:
      trust: whether to import the modules that a run's configuration names.
    """

    trust: bool = False

    def is_run(self, folder: str) -> bool:
        """Whether a folder is a run folder."""
        return run_folder.is_run(folder)

    def load(
        self,
        folder: str,
        gin_files: Sequence[str] = (),
        bindings: Sequence[str] = (),
        search_paths: Sequence[str] = (),
    ) -> LoadedModel:
        """Like `load`, for a run folder, on one device, with adapters unmerged."""
        run = run_folder.load(folder, gin_files, bindings, search_paths, merge=False, trust=self.trust)
        return _of_run(run, folder)

    def described(self, folder: str) -> LoadedModel:
        """A run without adapters, with shapes (jax.ShapeDtypeStruct) for parameters: reads only its configuration."""
        trainer, model = run_folder.described(folder, trust=self.trust)
        return _of_run(TrainedRun(trainer, model, model.abstract_params, 0, False), folder)

    def optimizer(self, loaded: LoadedModel) -> tuple[int, PyTree] | None:
        """Like `run_folder.newest_optimizer`; None for a foreign model, too."""
        if loaded.training is None:
            return None
        model, training = loaded.model, loaded.training
        tx = training.optimizer.transformation(training.steps, model.trained(model.axes))
        return run_folder.newest_optimizer(loaded.path, model, tx, training.checkpointing)

    def save(self, folder: str, params: Params, gin: str) -> None:
        """Like `run_folder.save`."""
        run_folder.save(folder, params, gin)


def _of_run(run: TrainedRun, folder: str) -> LoadedModel:
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


def _foreign(
    path: str, gin_files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str], placed: Placed
) -> tuple[Trainer, LoadedModel]:
    foreign = open_model.open_model(path)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"  # bfloat16 is slow on CPUs
    own = hf_config.from_hf(foreign.config, dtype=dtype)
    longest = hf_config.longest(foreign.config)
    if isinstance(own, api.DecoderConfig) and own.max_length is None:
        own = dataclasses.replace(own, max_length=longest)
    if not foreign.tokenizer and own.vocab_size > _LARGEST_OF_BYTES:
        raise UserError(f"{path} has no tokenizer ({TOKENIZER_FILE}, tokenizer.model): put the model's own beside it")
    if not foreign.tokenizer:
        logging.getLogger(__name__).warning(
            "%s has no tokenizer: texts are read as UTF-8 bytes (@ByteVocabulary())", path
        )
    folder = path if os.path.isdir(path) else _written(foreign.tokenizer)
    length = min(own.max_length or _LENGTH, _LENGTHS.get(type(own), _LENGTH))
    record = config.Recorded(gin_of.run(own, folder, foreign.tokenizer, length), path)
    config.parse(gin_files, bindings, search_paths, record)
    trainer = config.build(Trainer)
    model = api.build(dataclasses.replace(trainer.model, lora=None))
    shardings = placed(trainer.plan, model)
    if foreign.tokenizer:
        model_rows.check_vocabulary(trainer.dataset.get_vocabulary(), model.config.vocab_size, path)
    if unread := files.unread_generation(folder):
        shown = limits.shortened(", ".join(f"{name} = {value}" for name, value in unread.items()), 200)[1:-1]
        logging.getLogger(__name__).warning(
            "%s: %s has %s, which is not used: requests, flags and Sampling say how texts are sampled",
            path,
            files.GENERATION_FILE,
            shown,
        )
    params = open_model.load_params(foreign, model, shardings, dtype=jax.numpy.dtype(model.config.dtype))
    return trainer, LoadedModel(model, params, trainer.dataset, path, None, "stored", like=foreign.config)


def _written(contents: Mapping[str, bytes]) -> str:
    """Writes these files to a temporary folder that lasts until this process ends: tokenizers are read on first use."""
    folder = tempfile.mkdtemp(prefix="capibara-tokenizer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in contents.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    return folder
