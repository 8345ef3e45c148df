"""The public interface of models: pure functions over a tree of parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core import tree, user_modules
from capibara.core.fields import short
from capibara.core.types import Batch, ParamAxes, Params, UserError
from capibara.kernels.matmul import dispatch as matmul
from capibara.kernels.matmul.quantized import Quantization
from capibara.models import flops, serving_params
from capibara.models.adapters import lora, lora_merge, trainable_tokens, unmerged
from capibara.models.adapters.lora import Lora
from capibara.models.adapters.unmerged import Adapter, BatchAdapters
from capibara.models.architectures.decoder import DecoderConfig
from capibara.models.architectures.deepseek_v4.config import DeepseekV4Config
from capibara.models.architectures.deepseek_v4.model import DeepseekV4
from capibara.models.architectures.encdec import EncoderDecoderConfig
from capibara.models.architectures.encoder import EncoderConfig
from capibara.models.architectures.gemma3n.config import Gemma3nConfig
from capibara.models.architectures.gemma3n.model import Gemma3n
from capibara.models.architectures.gemma3n.submodel import Submodel
from capibara.models.architectures.gemma4.config import Gemma4Config
from capibara.models.architectures.gemma4.model import Gemma4
from capibara.models.architectures.registry import (
    Encodes,
    Generates,
    ModelModule,
    PredictsAhead,
    ReadBatch,
    RunsByLayer,
    configurations,
    model_of,
    module_of,
    packs_prompts,
)
from capibara.models.architectures.zamba.config import ZambaConfig
from capibara.models.architectures.zamba.model import Zamba
from capibara.models.cache import paged, selection
from capibara.models.cache.dense import Cache, Packed, PrefillInputs, put_rows
from capibara.models.cache.paged import capacity
from capibara.models.layers import rope, stack, usage
from capibara.models.layers.layers import sine_table
from capibara.models.layers.rope import Rope, RopeScaling
from capibara.models.layers.stack import Stats
from capibara.models.mixers.gated_delta import GatedDelta
from capibara.models.mixers.kimi_delta import KimiDelta
from capibara.models.mixers.lightning import Lightning
from capibara.models.mixers.mamba import Mamba
from capibara.models.mixers.mamba2 import Mamba2
from capibara.models.mixers.mixer import Mixer
from capibara.models.mixers.rg_lru import RgLru
from capibara.models.mixers.rwkv import ChannelMix, Rwkv4
from capibara.models.mixers.short_conv import ShortConv
from capibara.models.mtp import module as mtp
from capibara.models.mtp.config import PREFIX as MTP
from capibara.models.mtp.config import Mtp, MtpMlp
from capibara.models.parts import moe
from capibara.models.parts.config import GATES, ComputeDtype, Head, TransformerConfig, longest_encoded, trains
from capibara.models.parts.disentangled import Disentangled, Distances, TableNorm, Terms
from capibara.models.parts.kinds import BlockIndexer, LayerKind, LocalHeads
from capibara.models.parts.latent_sizes import Indexer, LatentAttention
from capibara.models.parts.moe import Moe
from capibara.models.parts.multipliers import Multipliers
from capibara.models.parts.streaming import StreamingHeads, bounded
from capibara.sharding import Remat, RematPolicy

__all__ = [
    "Adapter",
    "Ahead",
    "BatchAdapters",
    "Cache",
    "ChannelMix",
    "ComputeDtype",
    "BlockIndexer",
    "DecoderConfig",
    "DeepseekV4",
    "DeepseekV4Config",
    "GATES",
    "Disentangled",
    "Distances",
    "EncoderConfig",
    "EncoderDecoderConfig",
    "GatedDelta",
    "Gemma3n",
    "Gemma3nConfig",
    "Gemma4",
    "Gemma4Config",
    "Head",
    "Indexer",
    "KimiDelta",
    "LatentAttention",
    "LayerKind",
    "Lightning",
    "LocalHeads",
    "Lora",
    "Mamba",
    "Mamba2",
    "Mixer",
    "Model",
    "Moe",
    "MTP",
    "Mtp",
    "MtpMlp",
    "Multipliers",
    "Packed",
    "PrefillInputs",
    "Quantization",
    "RgLru",
    "Rope",
    "RopeScaling",
    "Rwkv4",
    "ShortConv",
    "StreamingHeads",
    "Submodel",
    "TableNorm",
    "Terms",
    "TransformerConfig",
    "Zamba",
    "ZambaConfig",
    "bounded",
    "build",
    "capacity",
    "configurations",
    "model_of",
    "module_of",
    "longest_encoded",
    "mtp",
    "packs_prompts",
    "paged",
    "put_rows",
    "selection",
    "sine_table",
    "trainable_tokens",
    "unmerged",
    "rope",
    "usage",
    "without_mtp",
    "without_streaming",
]

Read = Callable[[Params, ReadBatch, Cache, bool], tuple[jax.Array, Cache]]
EmptyCache = Callable[[int, int, jax.typing.DTypeLike, int | None, int], Cache]
Begin = Callable[[Params, Batch], jax.Array]
RunLayer = Callable[[Params, jax.Array, Batch, int], tuple[jax.Array, dict[str, jax.Array]]]
PredictAhead = Callable[
    [Params, jax.Array, Sequence[jax.Array], Batch, RematPolicy, jax.Array | None], tuple[list[jax.Array], list[Stats]]
]
Draft = Callable[[Params, jax.Array, jax.Array, PrefillInputs, Cache], tuple[jax.Array, Cache]]

_Tree = TypeVar("_Tree", Params, ParamAxes)

_PREDICTS = "only a model that predicts the next token has a cache"


class Ahead(NamedTuple):
    """What the modules of a decoder with `mtp` do.

    Attributes:
      states: (parameters, final hidden states, the tokens that each module reads, batch, remat, step) -> what the head
        reads of each module, [B, T, D], and the statistics of their layers.
      draft: (parameters, hidden states, the tokens after them, how many count and where they are, cache) -> what the head
        reads of the first module, and the cache.
    """

    states: PredictAhead
    draft: Draft


class Hidden(Protocol):
    """(parameters, batch, remat, step) -> final hidden states and statistics, as Model.hidden."""

    def __call__(
        self, params: Params, batch: Batch, remat: RematPolicy | Remat = Remat.NONE, step: jax.Array | None = None
    ) -> tuple[jax.Array, Stats]: ...


@dataclasses.dataclass(frozen=True)
class Model:
    """A model without its parameters.

    Attributes:
      config: the configuration that it was built from.
      abstract_params: nested dict of jax.ShapeDtypeStruct.
      axes: the same nested dict, with a tuple of logical axis names for each leaf.
      init: PRNG key -> parameters.
      hidden: (parameters, batch, remat, step) -> final hidden states [B, T, D] and the layers' statistics: float32 sums
        over tokens [L, ...], empty for dense layers. `remat` is a Remat or RematPolicy; `step` is the train step, or
        None outside training.
      head: parameters -> output projection [V, D].
      adapt: (parameters of the plain model, PRNG key) -> parameters, with newly initialised adapters if it has any.
      encode: encoder-decoders only: (parameters, batch) -> the encoder's output [B, S, D]. A batch that already holds
        it as the entry `encoded` is not encoded again.
      read: (parameters, batch, cache, is_prefill) -> final hidden states [B, T, D] of the new tokens, and the updated
        cache; see `prefill`, `extend` and `decode`. None for a model that does not predict the next token.
      empty_cache: (batch, length, dtype, encoder_length, spare) -> cache.
      begin: decoders only: (parameters, batch) -> the input of the first layer, [B, T, D].
      layer: decoders without adapters only: (parameters of one layer, its input, batch, its index in layer_pattern) ->
        its output, and the inputs of its projections by weight name.
      ahead: decoders with `mtp` only: what their modules do.
    """

    config: TransformerConfig
    abstract_params: Params
    axes: ParamAxes
    init: Callable[[jax.Array], Params]
    hidden: Hidden
    head: Callable[[Params], jax.Array]
    adapt: Callable[[Params, jax.Array], Params]
    encode: Callable[[Params, Batch], jax.Array] | None = None
    read: Read | None = None
    empty_cache: EmptyCache | None = None
    begin: Begin | None = None
    layer: RunLayer | None = None
    ahead: Ahead | None = None

    @property
    def plain(self) -> Model:
        """The same model without adapters: all its parameters are trained."""
        return build(dataclasses.replace(self.config, lora=None))

    def of_length(self, length: int) -> Model:
        """The model for caches of up to `length` tokens a row, if its rotary frequencies depend on the row length.

        All rows of such a cache use the frequencies of a row of `length` tokens. The parameters are the same.
        """
        config = self.config
        if not isinstance(config, DecoderConfig) or not config.rope.scaling.by_length:
            return self
        return build(dataclasses.replace(config, max_length=length))

    def trained(self, params: _Tree) -> _Tree:
        """The trainable part of the parameters, or of a tree of the same structure."""
        chosen = trains(self.config)
        return params if chosen is None else tree.part(params, chosen)

    def frozen(self, params: Params) -> Params:
        """The part that is not trained."""
        chosen = trains(self.config)
        return {} if chosen is None else tree.part(params, lambda name: not chosen(name))

    @functools.cached_property  # a search of plans asks for it tens of thousands of times
    def trains_head(self) -> bool:
        """Whether training changes the output projection."""
        name = {Head.TIED: "embedding", Head.SEPARATE: "output", Head.SCORE: "score"}[self.config.head]
        if self.config.head is Head.TIED and self.config.lora is not None and self.config.lora.trainable_tokens:
            return True
        return self.config.lora is None or any(self.config.lora.trains(part) for part in (name, "output_bias"))

    def merge(self, params: Params) -> Params:
        """The plain model's parameters with all adapters merged into the weights."""
        return lora_merge.merge(params, self.config.lora, self.axes, self.config.module_layers)

    def base(self, params: Params) -> Params:
        """The plain model's parameters without the adapters."""
        return params if self.config.lora is None else lora_merge.base(params, self.config.lora, self.axes)

    def unmerge(self, merged: Params, adapters: Params) -> Params:
        """Undoes `merge`; `adapters` is what `trained` returned for the adapters that were merged."""
        return lora_merge.unmerge(merged, adapters, self.config.lora, self.axes, self.config.module_layers)

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """Logits [B, T, V] in float32. For sampling and tests; training never materialises them."""
        hidden, _ = self.hidden(params, batch)
        return self.logits_of(params, hidden)

    def logits_of(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Logits [B, T, V] in float32 of final hidden states [B, T, D]."""
        return self.capped(matmul.logits(hidden, self.head(params).astype(hidden.dtype)))

    def start_cache(
        self, batch: int, length: int, dtype: jax.typing.DTypeLike | None = None,
        encoder_length: int | None = None, spare: int = 0,
    ) -> Cache:  # fmt: skip
        """An empty cache for `batch` rows of up to `length` tokens; longer rows keep their last tokens.

        Args:
          batch: number of rows.
          length: token capacity of a row; layers with a window allocate no more than the window.
          dtype: dtype of keys and values; None: the compute dtype; int8: 8 bits, with one scale per token and head.
          encoder_length: length of the encoder's input, for an encoder-decoder.
          spare: extra capacity of layers with a window. It allows as many tokens to be rolled back (by smaller
            `lengths`) after they were read.
        """
        assert self.empty_cache is not None, _PREDICTS
        dtype = self.config.dtype.value if dtype is None else dtype
        return self.empty_cache(batch, length, dtype, encoder_length, spare)

    def prefill(self, params: Params, batch: ReadBatch, cache: Cache) -> tuple[jax.Array, Cache]:
        """Reads the first tokens of each row into an empty cache.

        Args:
          params: parameters, or the result of `serving`.
          batch: `tokens` [B, T], right-padded, and `counts` [B], the number of real tokens in each row (at least 1); for
            an encoder-decoder also the encoder's entries. See ReadBatch for those that may be left out.
          cache: made by `start_cache`.

        Returns:
          Logits [B, V] in float32 after each row's last token, and the updated cache.
        """
        return self._last(params, batch, cache, is_prefill=True)

    def resume(self, params: Params, batch: ReadBatch, cache: Cache) -> tuple[jax.Array, Cache]:
        """Like `prefill`, for rows whose first tokens are in the cache already; with `packed`, the logits are those after its ends."""
        return self._last(params, batch, cache, is_prefill=False)

    def extend(self, params: Params, batch: ReadBatch, cache: Cache) -> tuple[jax.Array, jax.Array, Cache]:
        """Like `resume`, but returns the logits [B, T, V] after every token, and its final hidden states [B, T, D]."""
        assert self.read is not None, _PREDICTS
        hidden, cache = self.read(params, batch, cache, False)
        return self.logits_of(params, hidden), hidden, cache

    def decode(
        self, params: Params, tokens: jax.Array, cache: Cache, adapters: BatchAdapters | None = None
    ) -> tuple[jax.Array, Cache]:
        """Reads one token [B] of each row; returns the logits [B, V] in float32 after it, and the updated cache."""
        batch: ReadBatch = {"tokens": tokens[:, None], "counts": jnp.ones_like(tokens), "adapters": adapters}
        return self.resume(params, batch, cache)

    def _last(self, params: Params, batch: ReadBatch, cache: Cache, *, is_prefill: bool) -> tuple[jax.Array, Cache]:
        assert self.read is not None, _PREDICTS
        hidden, cache = self.read(params, batch, cache, is_prefill)
        if packed := batch.get("packed"):
            hidden = hidden[packed.ends]
        if hidden.shape[1] > 1:
            last_B11 = (jnp.asarray(batch["counts"]) - 1)[:, None, None]
            hidden = jnp.take_along_axis(hidden, last_B11, axis=1)
        return self.logits_of(params, hidden)[:, 0], cache

    def serving(self, params: Params, convert: serving_params.Convert = lambda of_array, x: of_array(x)) -> Params:
        """The parameters as generation reads them fastest, as `serving_params.served`."""
        return serving_params.served(self.config, self.axes, params, convert)

    @property
    def serving_axes(self) -> ParamAxes:
        """The logical axes of what `serving` gives, where it turns nothing."""
        return serving_params.served_axes(self.config, self.axes, self.abstract_params)

    def computed(self, params: Params) -> Params:
        """The parameters in the compute dtype, those that are cast to it wherever they are used."""
        return serving_params.computed(self.config, self.axes, params)

    def capped(self, logits: jax.Array) -> jax.Array:
        """Logits after the model's soft cap, which scores do not have."""
        cap = self.config.logit_soft_cap
        return logits if cap is None or self.config.head is Head.SCORE else cap * jnp.tanh(logits / cap)

    def layer_loss(self, stats: Stats) -> jax.Array | float:
        """What the layers' statistics add to the loss sum: the router losses of a mixture of experts."""
        return 0.0 if self.config.moe is None else moe.router_loss(stats, self.config.moe)

    def layer_metrics(self, stats: Stats) -> dict[str, jax.Array]:
        """Scalar metrics from the layers' statistics: how evenly experts are used."""
        if self.config.moe is None:
            return {}
        return moe.router_metrics(stats, self.config.moe)

    @property
    def param_count(self) -> int:
        """Number of parameters of the plain model and the adapters, whatever their storage format."""
        return tree.param_count(self.whole_params)

    @property
    def whole_params(self) -> Params:
        """The abstract parameters of the plain model and the adapters, as if none were quantized."""
        return self._whole(self.abstract_params, lambda plain: plain.abstract_params)

    @property
    def whole_axes(self) -> ParamAxes:
        """The axes of `whole_params`."""
        return self._whole(self.axes, lambda plain: plain.axes)

    def _whole(self, trained: _Tree, of: Callable[[Model], _Tree]) -> _Tree:
        return trained if self.config.lora is None else tree.joined(self.trained(trained), of(self.plain))

    def flops_per_token(self, length: int, encoder_length: int | None = None) -> float:
        """Model FLOPs per trained token in a row of `length`; see `flops.flops_per_token`."""
        return flops.flops_per_token(self.config, self.whole_params, self.whole_axes, length, encoder_length)


def with_value_head(model: Model, value_head: bool) -> Model:
    """The model with or without a value head, and its adapters; all other parameters are the same."""
    return build(dataclasses.replace(model.config, value_head=value_head))


def without_streaming(model: Model) -> Model:
    """The model whose heads all retrieve, without gates; all other parameters are the same."""
    return build(dataclasses.replace(model.config, streaming=None))


def without_mtp(model: Model) -> Model:
    """The model without the modules that predict further tokens; all other parameters are the same."""
    if not isinstance(model.config, DecoderConfig) or model.config.mtp is None:
        return model
    return build(dataclasses.replace(model.config, mtp=None))


def with_head(model: Model, head: Head) -> Model:
    """The model with another head, without adapters; all other parameters are the same."""
    return build(dataclasses.replace(model.config, lora=None, head=head))


@functools.lru_cache(maxsize=32)
def build(config: TransformerConfig) -> Model:
    """Builds the model of a configuration. Computes nothing and places nothing on a device."""
    make = module_of(config)
    user_class = user_modules.own_class(make)
    of_plain = nnx.split(nnx.eval_shape(lambda: make(config, nnx.Rngs(0))))
    graphdef, template = of_plain if config.lora is None else _adapted_template(make, config)

    def bind(params: Params) -> ModelModule:
        return _bound(graphdef, template, params)

    def init(key: jax.Array) -> Params:
        module = _adapted(make(config, nnx.Rngs(key)), config, jax.random.fold_in(key, 1))
        return nnx.to_pure_dict(nnx.state(module))

    def adapt(params: Params, key: jax.Array) -> Params:
        begun_anew = {"score": config.head is Head.SCORE, GATES: config.has_gates, "critic": config.value_head}
        begun_anew |= {MTP: bool(config.mtp_windows)}
        for name, is_there in begun_anew.items():
            if is_there and name not in params:
                params = {**params, name: init(key)[name]}
        return nnx.to_pure_dict(nnx.state(_adapted(_bound(*of_plain, params), config, key)))

    def hidden(
        params: Params, batch: Batch, remat: RematPolicy | Remat = Remat.NONE, step: jax.Array | None = None
    ) -> tuple[jax.Array, Stats]:
        with lora.at_step(step):
            result = bind(params)(batch, remat if isinstance(remat, RematPolicy) else RematPolicy(remat), step)
        return result if user_class is None else _checked_hidden(result, user_class, config.embed_dim)

    def encode(params: Params, batch: Batch) -> jax.Array:
        module = bind(params)
        assert isinstance(module, Encodes)
        return module.encode(batch, RematPolicy(), None)[0]

    def head(params: Params) -> jax.Array:
        # The layers of `serving` do not fit the template; the head does not need them.
        result = bind({name: value for name, value in params.items() if name not in ("layers", "decoder")}).head()
        return (
            result if user_class is None else _checked_head(result, user_class, (config.vocab_size, config.embed_dim))
        )

    alike = not config.module_layers and config.streaming is None and config.block_sizes is None
    begin, layer = _layerwise(bind) if getattr(make, "layerwise", False) and alike else (None, None)
    read, empty_cache = _generating(bind, config.module_layers) if hasattr(make, "read") else (None, None)
    return Model(
        config=config,
        abstract_params=nnx.to_pure_dict(template),
        axes=_axes(template, make),
        init=init,
        hidden=hidden,
        head=head,
        adapt=adapt,
        encode=encode if hasattr(make, "encode") else None,
        read=read,
        empty_cache=empty_cache,
        begin=begin,
        layer=layer,
        ahead=_ahead(bind) if config.mtp_windows else None,
    )


def _axes(template: nnx.State, make: Callable[..., ModelModule]) -> ParamAxes:
    """The nested dict of a model's axes."""

    def names(variable: nnx.Variable) -> nnx.Variable:
        if "axes" not in variable.get_metadata():
            shape = tuple(variable.get_value().shape)
            raise UserError(
                f"{getattr(make, '__name__', make)} has a parameter of the shape {shape} without axes: make it with layers.param, as in "
                "examples/extend/my_model.py"
            )
        return variable.replace(_Names(variable.axes))

    result = jax.tree.map(names, template, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return jax.tree.map(lambda n: n.names, nnx.to_pure_dict(result), is_leaf=lambda x: isinstance(x, _Names))


def _checked_hidden(output: object, class_name: str, D: int) -> tuple[jax.Array, Stats]:
    """What a model of the user's has returned; raises UserError if it is no hidden states and statistics."""
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], dict):
        shape = jnp.shape(output[0])
        if len(shape) == 3 and shape[-1] == D:
            return output
    shapes = jax.tree.map(jnp.shape, output)
    raise UserError(
        f"{class_name}.__call__ returned {short(shapes)} (shapes), must return two: hidden states [B, T, {D}], and a dict of the "
        "layers' statistics"
    )


def _checked_head(output: jax.Array, class_name: str, shape: tuple[int, int]) -> jax.Array:
    if jnp.shape(output) != shape:
        raise UserError(f"{class_name}.head returned the shape {jnp.shape(output)}, must return {shape} [V, D]")
    return output


def _generating(bind: Callable[[Params], ModelModule], layers: tree.LayersOf) -> tuple[Read, EmptyCache]:
    """`read` and `empty_cache` of a Model; `layers` of the modules that some layers lack."""

    def generates(params: Params) -> Generates:
        module = bind(params)
        assert isinstance(module, Generates)
        return module

    def read(params: Params, batch: ReadBatch, cache: Cache, is_prefill: bool) -> tuple[jax.Array, Cache]:
        values: list[Params] = []
        rest = serving_params.with_layers(params, lambda of_all: values.extend(stack.unstacked(of_all, layers)))
        return generates(rest).read(values, batch, cache, is_prefill)

    def empty_cache(
        batch: int, length: int, dtype: jax.typing.DTypeLike, encoder_length: int | None, spare: int
    ) -> Cache:
        return generates({}).start_cache(batch, length, dtype, encoder_length, spare)

    return read, empty_cache


def _ahead(bind: Callable[[Params], ModelModule]) -> Ahead:
    """`ahead` of a Model."""

    def predicts(params: Params) -> PredictsAhead:
        module = bind({name: value for name, value in params.items() if name != "layers"})
        assert isinstance(module, PredictsAhead)
        return module

    def states(
        params: Params,
        hidden: jax.Array,
        tokens: Sequence[jax.Array],
        batch: Batch,
        remat: RematPolicy,
        step: jax.Array | None,
    ) -> tuple[list[jax.Array], list[Stats]]:
        return predicts(params).predict_ahead(hidden, tokens, batch, remat, step)

    def draft(
        params: Params, hidden: jax.Array, tokens: jax.Array, now: PrefillInputs, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        module = predicts(params)
        x, layer = module.draft(hidden, tokens, now, cache)
        return x, cache | {"layers": (*cache["layers"][:-1], layer)}

    return Ahead(states, draft)


def _layerwise(bind: Callable[[Params], ModelModule]) -> tuple[Begin, RunLayer]:
    """`begin` and `layer` of a Model."""

    def runs(params: Params) -> RunsByLayer:
        module = bind(params)
        assert isinstance(module, RunsByLayer)
        return module

    def begin(params: Params, batch: Batch) -> jax.Array:
        return runs({name: value for name, value in params.items() if name != "layers"}).begin(batch)

    def layer(values: Params, x: jax.Array, batch: Batch, index: int) -> tuple[jax.Array, dict[str, jax.Array]]:
        return runs({}).layer(values, x, batch, index)

    return begin, layer


def _bound(graphdef: nnx.GraphDef[ModelModule], template: nnx.State, params: Params) -> ModelModule:
    state = jax.tree.map(lambda v: v, template)
    nnx.replace_by_pure_dict(state, dict(params))
    return nnx.merge(graphdef, state)


def _adapted(module: ModelModule, config: TransformerConfig, key: jax.Array) -> ModelModule:
    if config.lora is not None:
        assert isinstance(module, nnx.Module)
        lora.attach(module, config.lora, nnx.Rngs(key), config.module_layers)
    return module


def _adapted_template(
    make: Callable[..., ModelModule], config: TransformerConfig
) -> tuple[nnx.GraphDef[ModelModule], nnx.State]:
    """The structure of a model with adapters, and its abstract parameters."""
    return nnx.split(nnx.eval_shape(lambda: _adapted(make(config, nnx.Rngs(0)), config, jax.random.key(0))))


@dataclasses.dataclass(frozen=True)
class _Names:
    """Wraps a tuple of names so that tree functions take it as one leaf."""

    names: tuple[str, ...]
