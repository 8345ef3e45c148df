"""From one form of a model to another: what `capibara convert --from --to` does."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from capibara import outputs
from capibara.data.dataset import Dataset
from capibara.data.vocabulary import SentencePieceVocabulary, TokenizerJsonVocabulary, Vocabulary
from capibara.interop import checkpoint, gin_of, hf_config, hf_folder, quantization
from capibara.interop.checkpoint import ForeignModel
from capibara.interop.quantize import Quantize
from capibara.interop.tensors import Shape
from capibara.models import api
from capibara.types import Params, UserError

FORMATS = ("hf", "gguf", "capibara")
_FLOATS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
DTYPES = (*_FLOATS, "q8_0", "q4_0")
_SPECIAL = ("bos", "eos", "pad")


@dataclasses.dataclass(frozen=True)
class OurModel:
    """A trained model of ours as a ForeignModel: what its parameters are in a Hugging Face checkpoint.

    Attributes:
      config: of config.json.
      tokenizer: files, by name.
      vocabulary: of the run; None: that of the tokenizer.
    """

    model: api.Model
    params: Params
    config: dict[str, Any]
    tokenizer: dict[str, bytes]
    vocabulary: Vocabulary | None = None

    def shapes(self) -> dict[str, Shape]:
        return checkpoint.hf_shapes(self.model, self.config["model_type"])

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """All of them, in the order of `shapes`."""
        return checkpoint.hf_tensors(self.params, self.model, self.config["model_type"])


def of_run(model: api.Model, params: Params, dataset: Dataset) -> OurModel:
    """A run's model with its tokenizer.

    Args:
      dataset: of the run: its vocabulary, and the length of its rows.

    Raises:
      UserError: transformers has no such architecture.
    """
    vocabulary, length = dataset.get_vocabulary(), dataset.length
    ids = {f"{name}_token_id": getattr(vocabulary, f"{name}_id") for name in _SPECIAL}
    like = ids | {"max_position_embeddings": model.config.max_length or length}
    if isinstance(model.config, api.EncoderDecoderConfig):
        like["decoder_start_token_id"] = vocabulary.bos_id
    return OurModel(model, params, hf_config.to_hf(model.config, like), _tokenizer(vocabulary, length), vocabulary)


def write(
    source: ForeignModel | OurModel,
    target: str,
    form: str | None,
    dtype: str | None,
    save: Callable[[str, Params, str], None],
    how: Quantize | None = None,
) -> str:
    """Writes a model; returns a line that says what is there now.

    Args:
      source: the model.
      target: the folder or file, a new one.
      form: one of FORMATS; None: gguf where the target is called so, else hf.
      dtype: one of DTYPES, of the stored tensors; None: as they are, bf16 of a run of ours.
      save: (folder, parameters, Gin text) -> writes a run folder.
      how: the layers' weights are written in 4 bits; None: they are not.

    Raises:
      UserError: the target is there already, or the form cannot hold this model.
    """
    if outputs.is_remote(target):
        raise UserError(f"--to={target} must be a local path: copy what is written there")
    if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise UserError(f"--to={target} is there already: name another, or remove it")
    form = form or ("gguf" if target.endswith(".gguf") else "hf")
    if how is not None:
        return _in_4_bits(source, target, form, dtype, how)
    if form == "capibara":
        if dtype not in (None, "f32"):
            raise UserError(f"--dtype={dtype} is of hf and gguf: a run folder has f32")
        return _as_run(source, target, save)
    if dtype is None:
        dtype = _stored(source)
    if form == "hf" and dtype not in _FLOATS:
        raise UserError(f"--dtype={dtype} is of gguf, must be one of {', '.join(_FLOATS)} for hf")
    view = source if isinstance(source, OurModel) else _Checked(source)
    shapes = view.shapes()
    config = dict(view.config) | {name: _FLOATS.get(dtype, "float32") for name in ("dtype", "torch_dtype")}
    if form == "gguf":
        from capibara.interop import gguf_write

        gguf_write.write_gguf(target, config, view.tensors(), source.tokenizer, dtype=dtype)
    else:
        hf_folder.save_hf(target, config, shapes, view.tensors(), source.tokenizer, dtype=_FLOATS[dtype])
    return f"{target}: {config['model_type']}, {len(shapes)} tensors in {dtype}"


def _in_4_bits(source: ForeignModel | OurModel, target: str, form: str, dtype: str | None, how: Quantize) -> str:
    if form == "capibara":
        raise UserError(f"--quantize={how.method} is of hf and gguf: a run folder has f32")
    fixed = "q4_0" if form == "gguf" else "f16"
    if dtype not in (None, fixed):
        raise UserError(f"--dtype={dtype} with --quantize={how.method}, whose {form} has {fixed}: leave it out")
    if not isinstance(source, OurModel):
        model = api.build(hf_config.from_hf(source.config))
        config = hf_config.to_hf(model.config, source.config)
        stored = hf_folder.DTYPES[_FLOATS[_stored(source)]]
        source = OurModel(model, _here(source, model, stored), config, source.tokenizer)
    made = quantization.quantize(
        source.model, source.params, source.config, source.tokenizer, how,
        q4_0=form == "gguf", vocabulary=source.vocabulary,
    )  # fmt: skip
    if form == "gguf":
        from capibara.interop import gguf_write

        gguf_write.write_gguf(target, made.config, made.tensors(), source.tokenizer, dtype=fixed)
    else:
        hf_folder.save_hf(
            target, made.words_config, made.word_shapes(), made.in_words(), source.tokenizer, dtype=_FLOATS[fixed]
        )
    size = made.grid.group_size
    return (
        f"{target}: {made.config['model_type']}, {len(made.packed)} weights in 4 bits by {how.method}, groups of {size}"
    )


def _here(source: ForeignModel, model: api.Model, dtype: Any = None) -> Params:
    """A foreign model's parameters on this host."""
    here = jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), model.abstract_params)
    return checkpoint.load_params(source, model, here, dtype=dtype)


class _Checked:
    """A foreign model whose tensors are those that its configuration asks for, under the names that we write."""

    def __init__(self, foreign: ForeignModel):
        self._foreign, self._model = foreign, api.build(hf_config.from_hf(foreign.config))
        self.config = hf_config.to_hf(self._model.config, foreign.config)

    def shapes(self) -> dict[str, Shape]:
        return checkpoint.hf_shapes(self._model, self.config["model_type"])

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        return checkpoint.foreign_tensors(self._foreign, self._model, self.config["model_type"])


def _as_run(source: ForeignModel | OurModel, target: str, save: Callable[[str, Params, str], None]) -> str:
    if isinstance(source, OurModel):
        raise UserError("--from is a run folder already: --format=capibara is for foreign models")
    config = hf_config.from_hf(source.config)
    longest = hf_config.text_part(source.config).get("max_position_embeddings")
    if isinstance(config, api.DecoderConfig) and config.max_length is None:
        config = dataclasses.replace(config, max_length=longest)  # so that the way back says it again
    model = api.build(config)
    params = _here(source, model)
    os.makedirs(target, exist_ok=True)
    for name, content in source.tokenizer.items():
        with open(os.path.join(target, name), "wb") as file:
            file.write(content)
    save(target, params, gin_of.run(model.config, target, source.tokenizer))
    return f"{target}: {model.param_count:,} parameters, config.gin: train with Trainer.init_from = {target!r}"


def _stored(source: ForeignModel | OurModel) -> str:
    """The dtype of most of a model's numbers."""
    if isinstance(source, OurModel):
        return "bf16"
    shapes = source.shapes()
    largest = max(shapes, key=lambda name: np.prod(shapes[name], dtype=np.int64))
    return {"float32": "f32", "float16": "f16"}.get(source.read(largest).dtype.name, "bf16")


def _tokenizer(vocabulary: Vocabulary, length: int) -> dict[str, bytes]:
    """The files of a run's tokenizer, those that lie beside it included."""
    if isinstance(vocabulary, SentencePieceVocabulary):
        with open(vocabulary.path, "rb") as file:
            return {"tokenizer.model": file.read()}
    if not isinstance(vocabulary, TokenizerJsonVocabulary):
        return {}
    files = hf_folder.carried(vocabulary.folder)
    files.pop("generation_config.json", None)  # of the model that was there
    if vocabulary.folder != vocabulary.path:  # a file, of any name
        with open(vocabulary.path, "rb") as file:
            files["tokenizer.json"] = file.read()
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length}
    about |= {f"{name}_token": vocabulary.tokenizer.id_to_token(getattr(vocabulary, f"{name}_id")) for name in _SPECIAL}
    files.setdefault("tokenizer_config.json", (json.dumps(about, indent=2) + "\n").encode())
    return files
