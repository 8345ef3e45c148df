"""Quantizes a decoder to 4 bits so that its layers' outputs on a calibration text change little: GPTQ and AWQ.

Works layer by layer, and holds only one layer's inputs of all activations. With GPTQ a layer's inputs are the outputs
of the layers before it after rounding, so that it corrects their errors; with AWQ those before rounding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from capibara.core import projections, tree
from capibara.core.types import HostBatch, Params, PyTree, UserError
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.interop.hf import tables
from capibara.interop.hf.layout import tensors
from capibara.interop.hf.layout.tensors import Shape, Tensor
from capibara.interop.quantize import awq, calibration, grid
from capibara.interop.quantize.gptq import gptq
from capibara.interop.quantize.grid import Grid, Packed
from capibara.interop.quantize.options import GROUP_SIZES, Method, Quantize
from capibara.interop.quantize.values import finite
from capibara.models import api

_INTEGERS = (".qweight", ".qzeros", ".g_idx")  # parts of a weight in words
_BATCH = 8  # rows that are run at once
# Weights with the same inputs as another one.
_READS = {projection.path: projection.reads_as for projection in projections.QUANTIZABLE}
_INPUTS = tuple(dict.fromkeys(_READS.values()))
# Dimensions of a weight's inputs, in the letters of interop.hf.tensors.
_LETTERS = {projection.name: tensors.letters(projection.in_axes) for projection in projections.QUANTIZABLE}
# Readers of AWQ divide some families' activations by these tensors, and do not assume 1 for missing ones.
_ACTIVATION_SCALES = {"gpt_neox": "gpt_neox.layers.{l}.mlp.act.scales"}


def grid_of(how: Quantize, model: api.Model, *, q4_0: bool) -> Grid:
    """The quantization grid of a model.

    Args:
      how: the request.
      model: the model.
      q4_0: whether GGUF's Q4_0 must be able to store the result.

    Raises:
      UserError: the group size does not divide the weights.
    """
    c = model.config
    sizes = sorted({c.embed_dim, c.num_heads * c.head_size, c.mlp_dim})
    fitting = [size for size in GROUP_SIZES if not any(inputs % size for inputs in sizes)]
    chosen = how.group_size or (32 if q4_0 else next(iter(fitting), 32))
    if chosen not in fitting:
        ways = f"try {fitting[0]}" if fitting else "this model cannot be quantized"
        raise UserError(f"--group_size={chosen} must divide the weights' inputs ({', '.join(map(str, sizes))}): {ways}")
    symmetric = how.method is not Method.AWQ if how.symmetric is None else how.symmetric
    return Grid(chosen, symmetric=q4_0 or symmetric, signed=q4_0)


@dataclasses.dataclass(frozen=True)
class QuantizedModel:
    """A model whose layers' weights are quantized to 4 bits, as the tensors of a checkpoint.

    Attributes:
      model: without adapters.
      params: the parameters that are not quantized; entries of quantized ones are meaningless.
      packed: the quantized weights, by their names in a Hugging Face checkpoint.
      config: contents of config.json.
      tokenizer: files, by name.
      method, grid: how they were rounded.
    """

    model: api.Model
    params: Params
    packed: Mapping[str, Packed]
    config: dict[str, Any]
    tokenizer: Mapping[str, bytes]
    method: Method
    grid: Grid

    def tensors(self) -> Iterator[tuple[str, np.ndarray | Packed]]:
        """All tensors, by their names before quantization."""
        values = dict(zip(tree.path_names(self.params), jax.tree.leaves(self.params), strict=True))
        shapes = _shapes(self.model)
        for row in tables.of(self.config["model_type"], shapes, {}):
            for name, at in row.names(shapes):
                if name in self.packed:
                    yield name, self.packed[name]
                else:
                    yield name, row.join({path: np.asarray(values[path][at]) for path in row.ours}, shapes)

    def in_words(self) -> Iterator[tuple[str, np.ndarray]]:
        """All tensors in the format of AutoAWQ or GPTQModel."""
        for name, value in self.tensors():
            if isinstance(value, Packed):
                parts = (
                    value.awq()
                    if self.method is Method.AWQ
                    else value.gptq(zero_offset=1 if self.grid.symmetric else 0)
                )
                yield from ((f"{name.removesuffix('weight')}{part}", array) for part, array in parts.items())
            else:
                yield name, value
        yield from ((name, np.ones(shape, np.float16)) for name, shape in self._activation_scales().items())

    def word_shapes(self) -> dict[str, Shape]:
        """Names and shapes of the tensors of `in_words`."""
        shapes = _shapes(self.model)
        result: dict[str, Shape] = {}
        for row in tables.of(self.config["model_type"], shapes, {}):
            for name, _ in row.names(shapes):
                if name not in self.packed:
                    result[name] = row.shape(shapes)
                    continue
                (outputs, inputs), groups = self.packed[name].codes.shape, self.packed[name].scales.shape[1]
                gptq = self.method is not Method.AWQ
                words = (inputs // 8, outputs) if gptq else (inputs, outputs // 8)
                parts: dict[str, Shape] = {
                    "qweight": words,
                    "qzeros": (groups, outputs // 8),
                    "scales": (groups, outputs),
                }
                parts |= {"g_idx": (inputs,)} if gptq else {}
                result |= {f"{name.removesuffix('weight')}{part}": shape for part, shape in parts.items()}
        return result | self._activation_scales()

    def word_dtypes(self) -> dict[str, np.dtype]:
        """Dtypes of the tensors of `in_words` that are no floats."""
        return {name: np.dtype(np.int32) for name in self.word_shapes() if name.endswith(_INTEGERS)}

    def _activation_scales(self) -> dict[str, Shape]:
        name = _ACTIVATION_SCALES.get(self.config["model_type"]) if self.method is Method.AWQ else None
        c = self.model.config
        return {} if name is None else {name.format(l=layer): (c.mlp_dim,) for layer in range(c.num_layers)}

    @property
    def words_config(self) -> dict[str, Any]:
        """The config.json for `in_words`."""
        about: dict[str, Any] = {"bits": 4, "group_size": self.grid.group_size}
        if self.method is Method.AWQ:
            about |= {"quant_method": "awq", "zero_point": not self.grid.symmetric, "version": "gemm"}
        else:
            about |= {"quant_method": "gptq", "sym": self.grid.symmetric, "desc_act": False, "lm_head": False}
            # The first format stores zeros minus 1, which a zero of 0 does not allow.
            about |= {"checkpoint_format": "gptq" if self.grid.symmetric else "gptq_v2"}
        return self.config | {"quantization_config": about, "dtype": "float16", "torch_dtype": "float16"}

    def float_params(self) -> Params:
        """The model's parameters after quantization, float32."""
        shapes = _shapes(self.model)
        values: dict[str, np.ndarray] = {}
        for row in tables.of(self.config["model_type"], shapes, {}):
            for name, at in row.names(shapes):
                if name in self.packed:
                    stored = _as_stored(row, self.packed[name].values())
                    for path, part in row.split(stored, shapes).items():
                        values.setdefault(path, np.empty(shapes[path], np.float32))[at] = part
        return tree.map_with_names(lambda path, x: values.get(path, x), self.params)


def quantize(
    model: api.Model,
    params: Params,
    config: dict[str, Any],
    tokenizer: Mapping[str, bytes],
    how: Quantize,
    *,
    q4_0: bool,
    vocabulary: Vocabulary | None = None,
    show: Callable[[str, str], None] = lambda topic, detail: None,
) -> QuantizedModel:
    """Quantizes a model's layers to 4 bits.

    Args:
      model: a decoder without experts and adapters.
      params: complete on this host.
      config: contents of config.json.
      tokenizer: files, by name.
      how: the request.
      q4_0: whether GGUF's Q4_0 must be able to store the weights.
      vocabulary: for the calibration text; None: the tokenizer's.
      show: reports the current layer.

    Raises:
      UserError: the model is not supported, has values that are not finite, the group size or format does not suit it,
        or the calibration text cannot be used.
    """
    if not isinstance(model.config, api.DecoderConfig) or model.config.moe is not None:
        raise UserError(f"--quantize={how.method} is for decoders without experts, not for {config['model_type']}")
    if model.layer is None or model.config.mixer is not None or model.config.one_branch:
        raise UserError(
            f"--quantize={how.method} is for decoders whose layers all have attention and an MLP, not for "
            f"{config['model_type']}: write a GGUF file with --dtype=q4_k_m"
        )
    chosen = grid_of(how, model, q4_0=q4_0)
    model = api.build(
        dataclasses.replace(model.config, dtype=api.ComputeDtype.FLOAT32, quantization=api.Quantization.NONE)
    )
    batches: list[dict[str, np.ndarray]] = []
    if how.calibration is not None:
        length = min(how.length, model.config.max_length or how.length)
        rows = calibration.rows(how.calibration, tokenizer, vocabulary, length=length, most=how.rows)
        if (largest := int(rows.max())) >= model.config.vocab_size:
            raise UserError(
                f"the tokenizer gives the id {largest} for --calibration={how.calibration}, and the model has "
                f"vocab_size = {model.config.vocab_size}: put the model's own tokenizer beside it"
            )
        batches = [_batch(rows[i : i + _BATCH]) for i in range(0, len(rows), _BATCH)]
    work = _Layers(model, config["model_type"], how, chosen, batches)
    if not q4_0:
        work.check_words()
    packed, rest = work.run(params, show)
    return QuantizedModel(model, rest, packed, config, tokenizer, how.method, chosen)


class _Layers:
    """Processes the layers one after the other."""

    def __init__(
        self, model: api.Model, model_type: str, how: Quantize, chosen: Grid, batches: list[dict[str, np.ndarray]]
    ):
        assert model.begin is not None and model.layer is not None and isinstance(model.config, api.DecoderConfig)
        self._config, self._begin, self._model_layer = model.config, model.begin, model.layer
        self._how, self._grid, self._batches = how, chosen, batches
        self._shapes = _shapes(model)
        self._all = tables.of(model_type, self._shapes, {})
        self._rows = [row for row in self._all if _is_projection(row)]
        self._layer_statistics = jax.jit(functools.partial(_layer_statistics, model.layer), static_argnums=3)
        self._next_input = jax.jit(lambda *arguments: self._model_layer(*arguments)[0], static_argnums=3)

    def check_words(self) -> None:
        """Raises UserError if outputs do not fill words of eight."""
        for row in self._rows:
            shape = row.shape(self._shapes)
            outputs = shape[1 if _inputs_first(row) else 0]
            if outputs % 8:
                raise UserError(
                    f"{row.name.format(l=0)} has {outputs} outputs, hf in 4 bits must have a multiple of 8: use gguf"
                )

    def run(self, params: Params, show: Callable[[str, str], None]) -> tuple[dict[str, Packed], Params]:
        """The quantized weights by name, and the parameters with the other weights."""
        count = self._config.num_layers
        self._check_finite({**params, "layers": {}})
        begin = cast(Callable[[Params, HostBatch], jax.Array], self._begin)
        xs = [np.asarray(begin(params, batch)) for batch in self._batches]
        packed: dict[str, Packed] = {}
        others: list[PyTree] = []
        for index in range(count):
            show("quantizing", f"layer {index + 1} of {count}")
            layer = jax.tree.map(lambda x: np.asarray(x[index], np.float32), params["layers"])
            self._check_finite({"layers": layer}, index)
            layer, of_layer, xs = self._layer(layer, xs, index)
            packed |= of_layer
            others.append(tree.map_with_names(lambda name, x: np.zeros(()) if _last(name) in _LETTERS else x, layer))
        return packed, {**params, "layers": jax.tree.map(lambda *of_layers: np.stack(of_layers), *others)}

    def _check_finite(self, params: Params, index: int = 0) -> None:
        for path, value in zip(tree.path_names(params), jax.tree.leaves(params), strict=True):
            finite.check(
                next((row.name for row in self._all if path in row.ours), path).format(l=index), np.asarray(value)
            )

    def _layer(
        self, layer: awq.Layer, xs: list[np.ndarray], index: int
    ) -> tuple[awq.Layer, dict[str, Packed], list[np.ndarray]]:
        """A layer after quantization, its quantized weights, and the inputs of the next layer."""
        entry = index % len(self._config.layer_pattern)
        sums: dict[str, _Sums] = {}
        after = []
        for x, batch in zip(xs, self._batches):
            y, inputs = self._layer_statistics(layer, x, batch, entry)
            after.append(np.asarray(y))
            for name, (products, sizes) in inputs.items():
                sums.setdefault(name, _Sums()).add(products, sizes, x.shape[0] * x.shape[1])
        if self._how.method is Method.AWQ:
            layer = self._folded(layer, sums)
        rounded = {row: self._rounded(row, layer, sums) for row in self._rows}
        if self._how.method is Method.GPTQ:
            answers = dict(self._dequantized(rounded))
            now = tree.map_with_names(lambda name, x: answers.get(f"layers/{name}", x), layer)
            after = [np.asarray(self._next_input(now, x, batch, entry)) for x, batch in zip(xs, self._batches)]
        return layer, {row.name.format(l=index): value for row, value in rounded.items()}, after

    def _folded(self, layer: awq.Layer, sums: dict[str, _Sums]) -> awq.Layer:
        """The layer with AWQ's scales folded into it; adjusts the sums of scaled inputs."""
        for name, channels in awq.foldable(self._config, layer).items():
            weights = [
                _outputs_first(path, value) for path, value in _projections(layer) if _READS.get(path, path) == name
            ]
            item = sums[name]
            scales = awq.channel_scales(weights, item.products, item.sizes / item.count, self._grid, channels)
            layer = awq.fold(layer, self._config, name, scales)
            item.products = item.products / np.outer(scales, scales)
        return layer

    def _rounded(self, row: Tensor, layer: awq.Layer, sums: dict[str, _Sums]) -> Packed:
        """Quantizes the weight of a row of the table, which may be several of ours."""
        ours = dict(_projections(layer))
        names = [path.removeprefix("layers/") for path in row.ours]
        stored = row.join({path: ours[name] for path, name in zip(row.ours, names)}, self._shapes)
        weight = np.ascontiguousarray(stored.T if _inputs_first(row) else stored)
        if self._how.method is Method.RTN:
            return grid.rounded(weight, *self._grid.nearest(weight))
        products = sums[_READS.get(names[0], names[0])].products
        if not np.isfinite(products).all():
            raise UserError(f"{row.name}: its inputs are not finite on the calibration text: use another one, or rtn")
        if self._how.method is Method.GPTQ:
            return gptq(weight, products, self._grid, act_order=self._how.act_order)
        return grid.rounded(weight, *self._grid.fit(weight, np.diagonal(products)))

    def _dequantized(self, rounded: Mapping[Tensor, Packed]) -> Iterator[tuple[str, np.ndarray]]:
        """A layer's dequantized weights, by our names."""
        for row, value in rounded.items():
            yield from row.split(_as_stored(row, value.values()), self._shapes).items()


@dataclasses.dataclass
class _Sums:
    """Sums over tokens: of products of their inputs, x x^T, and of |x|; and the number of tokens."""

    products: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((), np.float32))
    sizes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((), np.float32))
    count: int = 0

    def add(self, products: jax.Array, sizes: jax.Array, count: int) -> None:
        self.products = self.products + np.asarray(products)
        self.sizes, self.count = self.sizes + np.asarray(sizes), self.count + count


def _layer_statistics(
    run: Callable[..., tuple[jax.Array, dict[str, jax.Array]]],
    layer: Params,
    x: jax.Array,
    batch: Mapping[str, jax.Array],
    entry: int,
) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """A layer's outputs, and the sums of its weights' inputs."""
    y, inputs = run(layer, x, batch, entry)
    flat = {name: inputs[name].reshape(x.shape[0] * x.shape[1], -1) for name in _INPUTS}
    return y, {name: (x_NI.T @ x_NI, jnp.sum(jnp.abs(x_NI), 0)) for name, x_NI in flat.items()}


def _batch(tokens: np.ndarray) -> dict[str, np.ndarray]:
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return {"tokens": tokens, "segment_ids": np.ones_like(tokens), "positions": positions}


def _shapes(model: api.Model) -> dict[str, Shape]:
    abstract = model.abstract_params
    return dict(zip(tree.path_names(abstract), (leaf.shape for leaf in jax.tree.leaves(abstract)), strict=True))


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _projections(layer: awq.Layer) -> Iterator[tuple[str, np.ndarray]]:
    """The weights of a layer that are quantized, by their names in it."""
    for name, value in zip(tree.path_names(layer), jax.tree.leaves(layer), strict=True):
        if _last(name) in _LETTERS:
            yield name, value


def _outputs_first(name: str, weight: np.ndarray) -> np.ndarray:
    """One of our weights as a matrix [O, I]."""
    inputs = len(_LETTERS[_last(name)])
    return weight.reshape(int(np.prod(weight.shape[:inputs])), -1).T


def _is_projection(row: Tensor) -> bool:
    return row.ours[0].startswith("layers/") and _last(row.ours[0]) in _LETTERS


def _inputs_first(row: Tensor) -> bool:
    """Whether a tensor of the checkpoint is [I, O] (GPT-2)."""
    return row.dims.split()[0] == _LETTERS[_last(row.ours[0])]


def _as_stored(row: Tensor, weight_OI: np.ndarray) -> np.ndarray:
    return weight_OI.T if _inputs_first(row) else weight_OI
