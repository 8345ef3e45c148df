"""Converts models between formats: the implementation of `capibara convert --from --to`."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, overload

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from capibara.core import limits, tree
from capibara.core.types import Params, PyTree, UserError
from capibara.data.dataset import Dataset
from capibara.data.tokenizers import files as tokenizer_files
from capibara.data.tokenizers.decoder_start import start_id
from capibara.data.tokenizers.vocabulary import SentencePieceVocabulary, TokenizerJsonVocabulary, Vocabulary
from capibara.interop import gin_of, hub, open_model, submodel_options, token_classification
from capibara.interop import peft_runs as adapters
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.interop.hf import model_card, tables, wrappers
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.open_model import ForeignModel, LoadedModel
from capibara.interop.peft import sums as peft_sums
from capibara.interop.peft.sum_options import Sum
from capibara.interop.quantize import compressed, quantization
from capibara.interop.quantize.formats import mxfp4
from capibara.interop.quantize.options import BY_TENSOR, Method, Quantize
from capibara.interop.t5x import names as t5x_names
from capibara.interop.t5x import read as t5x_read
from capibara.interop.t5x import states as t5x_states
from capibara.interop.t5x import write as t5x_write
from capibara.models import api
from capibara.storage import outputs, partial, stores

_STORED = ("hf", token_classification.FORMAT, "gguf", "pytorch", "t5x")
_PEFT = ("peft", "peft_fused")
_ADAPTERS = (*_PEFT, "gguf_lora")
_FILES = ("gguf", "gguf_lora")
# Of files in other formats: a folder with such a name would be taken for one.
_FILE_ENDINGS = frozenset(
    ".bin .ckpt .gz .h5 .json .keras .mlmodel .msgpack .npz .onnx .pb .pkl .pt .pth .safetensors .tar .tflite .zip".split()
)
FORMATS = (*_STORED, *_ADAPTERS, "capibara")
_FLOATS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_MXFP4 = "mxfp4"
_SPECIAL = ("bos", "eos", "pad")
_SENTENCEPIECE = {"t5": "spiece.model"}  # the model file's name, if it is not tokenizer.model

Show = Callable[[str, str], None]  # (current action, progress)


def _silent(topic: str, detail: str) -> None: ...


class ModelReader(Protocol):
    """Reads runs, and what Gin sets of models; this room knows neither training nor Gin."""

    def load_modules(self) -> None:
        """Imports the modules of the user's own models."""

    def is_run(self, folder: str) -> bool:
        """Whether a folder is a run folder."""

    def run(self, folder: str) -> LoadedModel:
        """The newest step of a run folder, on one device, with adapters unmerged."""

    def described(self, folder: str) -> LoadedModel:
        """A run without adapters, with shapes (jax.ShapeDtypeStruct) for parameters."""

    @property
    def completes(self) -> bool:
        """Whether the user sets anything of a foreign model's configuration."""

    def completed(
        self, model: api.TransformerConfig, path: str
    ) -> tuple[api.TransformerConfig, SentencePieceVocabulary | None]:
        """The configuration of a foreign model, as the user completes it, and the tokenizer that is named; None: its own."""

    def optimizer(self, loaded: LoadedModel) -> tuple[int, PyTree] | None:
        """The newest step of a run and its optimizer's state; None: there is none."""

    def save(self, folder: str, params: Params, gin: str) -> None:
        """Writes a run folder of parameters alone, with this configuration."""


@dataclasses.dataclass(frozen=True)
class OurModel:
    """A trained model of ours as a ForeignModel, with its parameters as tensors of a Hugging Face checkpoint.

    Attributes:
      config: contents of config.json.
      tokenizer: tokenizer files, by name.
      about: model card and licence files, by name.
      vocabulary: of the run; None: the tokenizer's.
      stored: the default dtype to write: f32, bf16 or f16.
      optimizer: optimizer state in T5X's format; None: none, or of a kind that T5X does not have.
    """

    model: api.Model
    params: Params
    config: dict[str, Any]
    tokenizer: dict[str, bytes]
    about: dict[str, bytes] = dataclasses.field(default_factory=dict)
    vocabulary: Vocabulary | None = None
    stored: str = "bf16"
    optimizer: t5x_states.Stored | None = None

    def shapes(self) -> dict[str, Shape]:
        return open_model.hf_shapes(self.model, self.config["model_type"])

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """All tensors, in the order of `shapes`."""
        return open_model.hf_tensors(self.params, self.model, self.config["model_type"])


def of_run(
    model: api.Model,
    params: Params,
    dataset: Dataset,
    origin: Mapping[str, bytes] | None = None,
    *,
    trained: bool = True,
) -> OurModel:
    """A run's model with its tokenizer.

    Args:
      dataset: of the run, for its vocabulary and row length.
      origin: files that came with its initial weights, by name, config.json included; None or empty: random weights.
      trained: whether the run has trained since.

    Raises:
      UserError: transformers has no such architecture.
    """
    whole = model
    if model.config.value_head:  # it is for training alone
        model = api.with_value_head(model, False)
    if model.config.streaming is not None:
        if not model.config.has_gates:
            logging.getLogger(__name__).warning(
                "the model has streaming heads, which its new configuration cannot say: name their file where it is served "
                "(docs/serving.md)"
            )
        model = api.without_streaming(model)
    vocabulary, length, about = dataset.get_vocabulary(), dataset.length, dict(origin or {})
    written = hf_config.kept_by_run(about.pop(hf_folder.CONFIG, b"{}"))
    ids: dict[str, Any] = {f"{name}_token_id": getattr(vocabulary, f"{name}_id") for name in _SPECIAL}
    if isinstance(model.config, api.EncoderDecoderConfig):
        ids["decoder_start_token_id"] = start_id(vocabulary)  # the decoder's first token in training and generation
    # The special token ids are the tokenizer's, unless the run was trained with another tokenizer.
    ends = tokenizer_files.ids_of(written.get("eos_token_id"), hf_folder.CONFIG)
    adds_start = bool(written) and (not trained or vocabulary.eos_id in ends)
    like = dict(written) if adds_start else written | ids
    if not written or "max_position_embeddings" in written:
        like |= {"max_position_embeddings": model.config.max_length or written.get("max_position_embeddings") or length}
    if model.config.mtp_windows and not _has_form(model.config, like):
        _log_without_mtp("no Hugging Face architecture has this model with them")
        model = api.without_mtp(model)
    if model is not whole:
        params = {name: params[name] for name in model.abstract_params}
    config = hf_config.to_hf(model.config, like)
    tokenizer = _tokenizer(vocabulary, length, config["model_type"])
    if trained and written:
        about = model_card.of_fine_tuned(about, written)
    stored = {name: short for short, name in _FLOATS.items()}.get(
        str(written.get("dtype") or written.get("torch_dtype")), "bf16"
    )
    return OurModel(model, params, config, tokenizer, about, vocabulary, stored)


def _has_form(config: api.TransformerConfig, like: Mapping[str, object]) -> bool:
    """Whether transformers has an architecture that computes this."""
    try:
        return bool(hf_config.to_hf(config, like))
    except UserError:
        return False


def _log_without_mtp(why: str) -> None:
    logging.getLogger(__name__).warning("the modules for multi-token prediction are left out: %s", why)


def without_mtp(source: ForeignModel | OurModel, why: str) -> ForeignModel | OurModel:
    """A model without modules that predict further tokens, with a line if it had some."""
    model = source.model if isinstance(source, OurModel) else api.build(hf_config.from_hf(source.config))
    if not model.config.mtp_windows:
        return source
    _log_without_mtp(why)
    config = wrappers.with_mtp(source.config, 0)
    if not isinstance(source, OurModel):
        source.config = config
        return source
    model = api.without_mtp(model)
    params = {name: source.params[name] for name in model.abstract_params}
    return dataclasses.replace(source, model=model, params=params, config=config)


def convert(
    path: str | Sum,
    target: str,
    form: str | None,
    dtype: str | None,
    base: str | None,
    reader: ModelReader,
    how: Quantize | None = None,
    show: Show = _silent,
    part: submodel_options.SubmodelSizes | None = None,
) -> str:
    """Writes a model in another format; returns a line that describes the result.

    Args:
      path: a run folder, a folder of PEFT, Hugging Face or T5X, or a .gguf file; or several adapters of PEFT or of
        runs, to be summed.
      target: the new folder or file.
      form: one of FORMATS; None: gguf if the target's name ends so, else hf.
      dtype: one of quantize.DTYPES, of the stored tensors; None: unchanged, bf16 for a run.
      base: the base model of an adapter; None: the one that it names.
      reader: reads runs, and models as Gin completes their configuration.
      how: how to quantize the layers' weights; None: not at all.
      show: reports the progress of long operations.
      part: the smaller model to extract from a Gemma 3n; None: the whole model.

    Raises:
      UserError: the target exists, the model cannot be read, or the format cannot hold it.
    """
    form = form or ("gguf" if target.endswith(".gguf") else "hf")
    check_target(target, form, dtype)
    reader.load_modules()
    path = hub.local_path(path) if isinstance(path, str) else path
    if part is not None and (form in _ADAPTERS or isinstance(path, Sum) or adapters.is_adapter(path)):
        raise UserError("--skip_layers and --mlp_dims are of whole models, not of adapters: merge them first")
    if isinstance(path, Sum):
        return _of_sum(path, target, form, dtype, base, reader, how, show)
    if not stores.of(path).has_local_paths and (path.endswith(".gguf") or not reader.is_run(path)):
        path = open_model.local_model(path)
    if adapters.is_adapter(path):
        return _of_adapter(path, target, form, dtype, base, reader, how, show)
    run = _run(path, reader)
    if form in _ADAPTERS:
        _check_unquantized(how)
        return _as_adapter(run, path, target, form, base)
    if base is not None:
        raise UserError(f"--base={base} is for adapters, and --from={path} is none: leave it out")
    if run is not None and form == "capibara" and run.model.config.lora is None:
        raise UserError("--from is a run folder already: --format=capibara is for foreign models and for adapters")
    if run is None:
        return write(_part(_foreign(path, reader), part), target, form, dtype, reader.save, how, show)
    source = _part(_merged(run), part)
    if form == "t5x":
        source = dataclasses.replace(source, optimizer=_optimizer(source, run, reader.optimizer(run)))
    return write(source, target, form, dtype, reader.save, how, show)


def _as_adapter(run: LoadedModel | None, path: str, target: str, form: str, base: str | None) -> str:
    """`convert` of a run's adapters to files of adapters."""
    if run is None:
        raise UserError(f"--format={form} is for a run with adapters, and --from={path} is no run folder")
    if run.model.config.head is api.Head.SCORE:
        raise UserError(f"--format={form} has no reward models: use hf, which merges the adapters")
    if run.model.config.value_head:
        raise UserError(
            f"--format={form} has no value heads: use hf, which merges the adapters and leaves the values out"
        )
    if form == "gguf_lora":
        return adapters.run_as_gguf(run, target, base)
    tokenizer = functools.partial(_tokenizer, run.tokenizer, run.dataset.length)
    return adapters.write_run(run, target, base, tokenizer, fused_experts=form == "peft_fused")


def _of_sum(
    of: Sum,
    target: str,
    form: str,
    dtype: str | None,
    base: str | None,
    reader: ModelReader,
    how: Quantize | None,
    show: Show,
) -> str:
    """`convert` for a sum of adapters."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = []
        for number, folder in enumerate(of.folders):
            if not adapters.is_adapter(folder):
                run, written = _run(folder, reader), os.path.join(scratch, str(number))
                if run is None:
                    raise UserError(f"{folder} is neither an adapter of PEFT nor a run with adapters: leave it out")
                adapters.write_run(run, written, base)
                folder = written
            folders.append(folder)
        of = dataclasses.replace(of, folders=tuple(folders))
        if form == "peft":
            _check_unquantized(how)
            return peft_sums.write(target, of, base)
        peft_sums.write(summed := os.path.join(scratch, "sum"), of, base)
        return _of_adapter(summed, target, form, dtype, base, reader, how, show)


def _of_adapter(
    path: str,
    target: str,
    form: str,
    dtype: str | None,
    base: str | None,
    reader: ModelReader,
    how: Quantize | None,
    show: Show,
) -> str:
    """`convert` for a PEFT folder."""
    if form in _PEFT:
        raise UserError(f"--from={path} is an adapter of PEFT already: use hf, gguf, gguf_lora, pytorch or capibara")
    if form == "gguf_lora":
        _check_unquantized(how)
        of = _source(adapters.base_of(path, base), reader)
        model = api.build(hf_config.from_hf(of.config))
        model_type = hf_config.to_hf(model.config, of.config)["model_type"]
        if isinstance(of, OurModel):
            weight = adapters.weights(of.params, of.model, model_type)
        else:
            weight = adapters.foreign_weights(of, model, model_type)
        return adapters.as_gguf(path, target, model, of.config, weight)
    return write(_adapted(path, base, reader), target, form, dtype, reader.save, how, show)


def _adapted(path: str, base: str | None, reader: ModelReader) -> OurModel:
    """The model of a PEFT folder's adapters and their base."""
    of = _source(adapters.base_of(path, base), reader)
    model, params = adapters.merged(path, *_loaded(of), of.config)
    return OurModel(
        model, params, hf_config.to_hf(model.config, of.config), tokenizer_files.over(of.tokenizer, path),
        model_card.of_fine_tuned(of.about, of.config), stored=stored(of),
    )  # fmt: skip


def opened(path: str, base: str | None, reader: ModelReader) -> ForeignModel | OurModel:
    """Any model: a run and the model of an adapter with their parameters, a foreign one with its tensors on disk.

    Args:
      path, base: as in `convert`.
      reader: reads runs, and models as Gin completes their configuration.

    Raises:
      UserError: it cannot be read.
    """
    return _adapted(path, base, reader) if adapters.is_adapter(path) else _source(path, reader)


def described(path: str, base: str | None, reader: ModelReader) -> ForeignModel | OurModel:
    """Like `opened`, with shapes for a run's parameters, and for the model of an adapter those of the base."""
    if adapters.is_adapter(path):
        of = described(adapters.base_of(path, base), None, reader)
        model = of.model if isinstance(of, OurModel) else api.build(hf_config.from_hf(of.config))
        files = tokenizer_files.over(of.tokenizer, path)
        about = model_card.of_fine_tuned(of.about, of.config)
        return OurModel(model, model.abstract_params, dict(of.config), files, about, stored=stored(of))
    if reader.is_run(path) and not t5x_read.is_t5x(path):
        return _as_model(reader.described(path))
    return _foreign(path, reader)


def _check_unquantized(how: Quantize | None) -> None:
    if how is not None:
        raise UserError(f"--quantize={how.method} is for hf and gguf: adapters are stored in f32")


def check_target(target: str, form: str, dtype: str | None) -> None:
    """Raises UserError if a model cannot be written to `target`, or not in this format and dtype; as in `convert`."""
    if not stores.of(target).has_local_paths:
        raise UserError(f"--to={target} must be a local path: write it there, then copy it")
    if (form in _FILES) != os.path.normpath(target).endswith(".gguf"):
        must = "must end in .gguf" if form in _FILES else "must not end in .gguf, which is read as a file"
        raise UserError(f"--to={target} with --format={form} {must}")
    ending = os.path.splitext(os.path.normpath(target))[1].lower()
    if form not in _FILES and ending in _FILE_ENDINGS:
        bare = os.path.splitext(os.path.normpath(target))[0]
        raise UserError(f"--to={target} with --format={form} must not end in {ending}: it is a folder, try --to={bare}")
    if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise UserError(f"--to={target} exists already: name another, or remove it")
    if os.path.isdir(target) and os.path.samefile(target, os.curdir):
        raise UserError(f"--to={target} is the current folder: name a new one")
    outputs.check_writable(target if form in _FILES else os.path.join(target, hf_folder.CONFIG))
    if form in ("capibara", *_ADAPTERS) and dtype not in (None, "f32"):
        form_name = "a run folder" if form == "capibara" else "an adapter"
        raise UserError(f"--dtype={dtype} is for {', '.join(_STORED)}: {form_name} is stored in f32")
    if form != "gguf" and dtype not in (None, *_FLOATS, *([_MXFP4] if form == "hf" else [])):
        raise UserError(f"--dtype={dtype} is for gguf, must be one of {', '.join(_FLOATS)} for {form}")


def _source(path: str, reader: ModelReader) -> ForeignModel | OurModel:
    run = _run(path, reader)
    return _foreign(path, reader) if run is None else _merged(run)


def _run(path: str, reader: ModelReader) -> LoadedModel | None:
    """A run with its adapters unmerged; None: the model is not a run."""
    # T5X's run folders have a config.gin, too.
    return reader.run(path) if reader.is_run(path) and not t5x_read.is_t5x(path) else None


def _merged(run: LoadedModel) -> OurModel:
    params = run.params if run.model.config.lora is None else jax.jit(run.model.merge)(run.params)
    return _as_model(dataclasses.replace(run, model=run.model.plain, params=params))


def _as_model(run: LoadedModel) -> OurModel:
    """A run without adapters."""
    trained = run.training is not None and run.training.init_from is not None
    return of_run(run.model, run.params, run.dataset, run.origin, trained=trained)


def _optimizer(source: OurModel, run: LoadedModel, optimizer: tuple[int, PyTree] | None) -> t5x_states.Stored | None:
    """The optimizer state for T5X to resume from; None: T5X starts anew, e.g. if the run had another optimizer."""
    if optimizer is None or run.training is None or run.model.config.lora is not None:
        return None
    if not t5x_states.is_adafactor(run.training.optimizer):
        return None
    abstract = run.model.abstract_params
    shapes = dict(zip(tree.path_names(abstract), (leaf.shape for leaf in jax.tree.leaves(abstract)), strict=True))
    scanned = source.config["model_type"] == "umt5"
    locations = list(t5x_states.locations(shapes, t5x_names.rows_of(source.config), scanned=scanned))
    step, opt_state = optimizer
    moments = dict(t5x_states.to_t5x(opt_state, shapes, locations))
    return t5x_states.Stored(step, moments, t5x_states.gin_of(run.training.optimizer))


def _foreign(path: str, reader: ModelReader) -> ForeignModel:
    foreign = open_model.open_model(path)
    if reader.completes:
        completed, vocabulary = reader.completed(hf_config.from_hf(foreign.config), path)
        foreign.config = hf_config.to_hf(completed, foreign.config)
        if vocabulary is not None:
            vocabulary.processor.get_piece_size()  # raises if the file is missing or invalid
            content = {"spiece.model": limits.read(vocabulary.file)}
            vars(foreign).update(tokenizer=foreign.tokenizer | content)  # overrides a cached property
    elif guessed := getattr(foreign, "guessed", None):
        read = hf_config.from_hf(foreign.config)
        fields = ", ".join(f"{name} = {getattr(read, name)!s}" for name in sorted(guessed))
        logging.getLogger(__name__).warning(
            "%s does not say all of its model: %s is taken, as in T5 and T5 1.1; or set --gin.%s.%s",
            path,
            fields,
            type(read).__name__,
            min(guessed),
        )
    return foreign


def _loaded(source: ForeignModel | OurModel) -> tuple[api.Model, Params]:
    """A model and its parameters, on one device."""
    if isinstance(source, OurModel):
        return source.model, source.params
    model = api.build(hf_config.from_hf(source.config))
    return model, _host_params(source, model)


def write(
    source: ForeignModel | OurModel,
    target: str,
    form: str,
    dtype: str | None,
    save: Callable[[str, Params, str], None],
    how: Quantize | None = None,
    show: Show = _silent,
) -> str:
    """`convert` for a model that was read, to a new target."""
    if form == "gguf" or how is not None:
        source = without_mtp(
            source, "GGUF files have none here" if how is None else f"--quantize={how.method} has none"
        )
    if how is not None and "score.weight" in source.shapes():
        raise UserError(f"--quantize={how.method} is for language models, and this is a reward model: leave it out")
    if how is not None and how.method in BY_TENSOR:
        return _by_tensor(source, target, form, dtype, how)
    if how is not None:
        return _in_4_bits(source, target, form, dtype, how, show)
    if form == "capibara":
        return _as_run(source, target, save)
    if form in ("gguf", "t5x") and "score.weight" in source.shapes():
        raise UserError(f"--format={form} has no reward models: use hf, pytorch or capibara")
    if form == token_classification.FORMAT:
        token_classification.check(source.shapes())
    view = source if isinstance(source, OurModel) else _CheckedModel(source)
    if form != "t5x" and view.config["model_type"] == tables.T5X_DECODER_TYPE:
        raise UserError(f"--format={form} has no decoder with T5's relative positions: use t5x or capibara")
    optimizer = source.optimizer if isinstance(source, OurModel) else None
    dtype = dtype or ("f32" if optimizer is not None else stored(source))  # weights that T5X resumes from stay exact
    shapes = view.shapes()
    computed = "bfloat16" if dtype == _MXFP4 else _FLOATS.get(dtype, "float32")
    config = dict(view.config) | dict.fromkeys(("dtype", "torch_dtype"), computed)
    if form == "gguf":
        from capibara.interop.gguf import write as gguf_write

        gguf_write.write_gguf(target, config, view.tensors(), source.tokenizer, source.about, dtype=dtype, show=show)
    elif form == "t5x":
        t5x_write.save_t5x(
            target, config, shapes, view.tensors(), source.tokenizer, dtype=_FLOATS[dtype], optimizer=optimizer,
            computing=_computing(source),
        )  # fmt: skip
        if optimizer is not None:
            return f"{target}: {config['model_type']}, {len(shapes)} tensors in {dtype}, Adafactor at step {optimizer.step}"
    else:
        tensors, exact = view.tensors(), {}
        if dtype == _MXFP4:
            shapes, tensors, config = _in_mxfp4(shapes, tensors, config)
            exact = {name: np.dtype(np.uint8) for name in shapes if name.endswith(mxfp4.PARTS)}
        if form == token_classification.FORMAT:
            shapes, config = token_classification.shapes_of(shapes), token_classification.config_of(config)
            tensors = token_classification.tensors_of(tensors)
        files, torch_file = source.tokenizer | source.about, form == "pytorch"
        hf_folder.save_hf(target, config, shapes, tensors, files, dtype=computed, state_dict=torch_file, exact=exact)
    return f"{target}: {config['model_type']}, {len(shapes)} tensors in {dtype}"


def _in_mxfp4(
    shapes: Mapping[str, Shape], tensors: Iterator[tuple[str, np.ndarray]], config: dict[str, Any]
) -> tuple[dict[str, Shape], Iterator[tuple[str, np.ndarray]], dict[str, Any]]:
    """Tensors and config.json of a gpt-oss, its experts in MXFP4."""
    if config["model_type"] != "gpt_oss":
        raise UserError(f"--dtype={_MXFP4} is for the experts of gpt_oss, not for {config['model_type']}: try bf16")
    config = config | {"quantization_config": mxfp4.CONFIG}
    return mxfp4.shapes_in(shapes), mxfp4.tensors_in(tensors), config


def _by_tensor(source: ForeignModel | OurModel, target: str, form: str, dtype: str | None, how: Quantize) -> str:
    """`write` of a decoder whose layers' weights are rounded one by one."""
    if form != "hf":
        raise UserError(f"--quantize={how.method} is for hf, not for {form}: use that, or gptq for GGUF files")
    short = dtype or (stored(source) if stored(source) != "f32" else "bf16")
    if short not in ("bf16", "f16"):
        raise UserError(f"--dtype={dtype} with --quantize={how.method}, whose floats are bf16 or f16: use one of these")
    view = source if isinstance(source, OurModel) else _CheckedModel(source)
    if not isinstance(view.model.config, api.DecoderConfig):
        raise UserError(f"--quantize={how.method} is for decoders, not for {view.config['model_type']}: leave it out")
    shapes, rows = view.shapes(), open_model.hf_rows(view.model, view.config["model_type"])
    created = compressed.compressed(shapes, rows, how, _FLOATS[short])
    joined = compressed.joined_largest(created.weights, rows, view.tensors()) if how.method is Method.NVFP4 else {}
    config = dict(view.config) | dict.fromkeys(("dtype", "torch_dtype"), _FLOATS[short])
    hf_folder.save_hf(
        target, config | {"quantization_config": created.config}, created.shapes, created.tensors(view.tensors(), joined),
        source.tokenizer | source.about, dtype=_FLOATS[short], exact=created.exact,
    )  # fmt: skip
    return f"{target}: {config['model_type']}, {len(created.weights)} weights in {how.method}"


def _in_4_bits(
    source: ForeignModel | OurModel, target: str, form: str, dtype: str | None, how: Quantize, show: Show
) -> str:
    if form not in ("hf", "gguf"):
        raise UserError(f"--quantize={how.method} is for hf and gguf, not for {form}: use one of these")
    fixed = "q4_0" if form == "gguf" else "f16"
    if dtype not in (None, fixed):
        raise UserError(f"--dtype={dtype} with --quantize={how.method}, whose {form} has {fixed}: leave it out")
    source = as_ours(source)
    created = quantization.quantize(
        source.model, source.params, source.config, source.tokenizer, how,
        q4_0=form == "gguf", vocabulary=source.vocabulary, show=show,
    )  # fmt: skip
    if form == "gguf":
        from capibara.interop.gguf import write as gguf_write

        gguf_write.write_gguf(
            target, created.config, created.tensors(), source.tokenizer, source.about, dtype=fixed, show=show
        )
    else:
        hf_folder.save_hf(
            target, created.words_config, created.word_shapes(), created.in_words(), source.tokenizer | source.about,
            dtype=_FLOATS[fixed], exact=created.word_dtypes(),
        )  # fmt: skip
    size = created.grid.group_size
    return f"{target}: {created.config['model_type']}, {len(created.packed)} weights in 4 bits by {how.method}, groups of {size}"


@overload
def _part(source: OurModel, part: submodel_options.SubmodelSizes | None) -> OurModel: ...
@overload
def _part(source: ForeignModel, part: submodel_options.SubmodelSizes | None) -> ForeignModel | OurModel: ...
def _part(source: ForeignModel | OurModel, part: submodel_options.SubmodelSizes | None) -> ForeignModel | OurModel:
    """What is left of a model."""
    if part is None:
        return source
    skip_layers, mlp_dims = part
    ours = as_ours(source)
    whole = ours.model.config
    if not isinstance(whole, api.Gemma3nConfig):
        raise UserError(f"--skip_layers and --mlp_dims are of gemma3n_text, not of {ours.config['model_type']}")
    of = api.Submodel(skip_layers=skip_layers, mlp_dims=mlp_dims)
    left = of.config(whole)
    params, config = of.params(whole, ours.params), hf_config.to_hf(left, ours.config)
    return dataclasses.replace(ours, model=api.build(left), params=params, config=config)


def as_ours(source: ForeignModel | OurModel) -> OurModel:
    """A model whose parameters are on this host, as they are stored."""
    if isinstance(source, OurModel):
        return source
    model = api.build(hf_config.from_hf(source.config))
    config = hf_config.to_hf(model.config, source.config)
    short = stored(source)
    params = _host_params(source, model, hf_folder.DTYPES[_FLOATS[short]])
    return OurModel(model, params, config, source.tokenizer, source.about, stored=short)


def _host_params(source: ForeignModel, model: api.Model, dtype: object = None) -> Params:
    """A foreign model's parameters on this host."""
    here = jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), model.abstract_params)
    return open_model.load_params(source, model, here, dtype=dtype)


class _CheckedModel:
    """A foreign model with exactly the tensors that its configuration implies, under the names that we write."""

    def __init__(self, foreign: ForeignModel):
        self._foreign, self.model = foreign, api.build(hf_config.from_hf(foreign.config))
        open_model.check(foreign, self.model)
        self.config = hf_config.to_hf(self.model.config, foreign.config)

    def shapes(self) -> dict[str, Shape]:
        return open_model.hf_shapes(self.model, self.config["model_type"])

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        return open_model.foreign_tensors(self._foreign, self.model, self.config["model_type"])


def _as_run(source: ForeignModel | OurModel, target: str, save: Callable[[str, Params, str], None]) -> str:
    model, params = _loaded(source)
    longest = hf_config.longest(source.config)
    config = dataclasses.replace(model.config, **_computing(source))
    if isinstance(config, api.DecoderConfig) and config.max_length is None:
        config = dataclasses.replace(config, max_length=longest)  # so that converting back restores it
    with partial.whole(target) as unfinished:
        for name, content in source.tokenizer.items():
            with open(os.path.join(unfinished, name), "wb") as file:
                file.write(content)
        files = {
            os.path.abspath(os.path.join(target, name)): name for name in (".", *source.tokenizer)
        }  # it may be moved
        outputs.replace(os.path.join(unfinished, tokenizer_files.PATHS), json.dumps(files, indent=1) + "\n")
        os.mkdir(own_folder := os.path.join(unfinished, tokenizer_files.ORIGIN))
        for name, content in open_model.origin_of(source).items():
            with open(os.path.join(own_folder, name), "wb") as file:
                file.write(content)
        save(unfinished, params, gin_of.run(config, target, source.tokenizer))
    return f"{target}: {model.param_count:,} parameters, config.gin: train with Trainer.init_from = {target!r}"


def _computing(source: ForeignModel | OurModel) -> dict[str, Any]:
    """Fields of a configuration that affect computation and training, of a run or from T5X's configuration."""
    if isinstance(source, OurModel):
        config = source.model.config
        return {"dtype": str(config.dtype), "dropout_rate": config.dropout_rate}
    return dict(source.computing) if isinstance(source, t5x_read.T5xModel) else {}


def stored(source: ForeignModel | OurModel) -> str:
    """The dtype that loses nothing of a foreign model; for a run its default dtype."""
    if isinstance(source, OurModel):
        return source.stored
    return {name: short for short, name in _FLOATS.items()}[open_model.stored_dtype(source)]


def _tokenizer(vocabulary: Vocabulary, length: int, model_type: str) -> dict[str, bytes]:
    """The files of a run's tokenizer, including those beside it."""
    if isinstance(vocabulary, SentencePieceVocabulary):
        carried_files = tokenizer_files.carried(os.path.dirname(vocabulary.file))
        files = {
            name: content for name, content in carried_files.items() if name not in tokenizer_files.SENTENCEPIECE_FILES
        }
        return files | {_SENTENCEPIECE.get(model_type, "tokenizer.model"): limits.read(vocabulary.file)}
    if not isinstance(vocabulary, TokenizerJsonVocabulary):
        return vocabulary.own_files().files
    files = tokenizer_files.carried(vocabulary.folder)
    files[tokenizer_files.TOKENIZER_FILE] = limits.read(vocabulary.file)  # whatever the file's name
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length}
    about |= {f"{name}_token": vocabulary.tokenizer.id_to_token(getattr(vocabulary, f"{name}_id")) for name in _SPECIAL}
    files.setdefault("tokenizer_config.json", (json.dumps(about, indent=2) + "\n").encode())
    return files
