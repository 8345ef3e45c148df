"""Predicts a train step's HBM on one device, part by part; a compile of the step proves or corrects it.

The peak is the largest of four moments: the forward pass of layers after the loop, if there are any (saved activations and
one layer, beside the head, which is gathered meanwhile), the loss (all saved activations, no gradients of layers yet), the
backward pass of the layers (saved activations, all gradients, and one layer's recomputation), and the update.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax

from capibara.core import projections
from capibara.kernels.cross_entropy import by_vocabulary
from capibara.kernels.cross_entropy.dispatch import by_vocabulary_on
from capibara.kernels.gate import few_tokens
from capibara.models.api import Head, paged
from capibara.planner.hardware.chips import Chip
from capibara.planner.hardware.tiling import LANES, SUBLANES
from capibara.planner.model.choice import Choice
from capibara.planner.model.workload import Stack, Workload
from capibara.sharding import Remat, RematPolicy

# Logits of one block in kernels/cross_entropy/by_tokens.py on TPU: at most this many bytes, at least this many blocks.
LOGITS_BYTES, FEWEST_BLOCKS = 256 * 2**20, 4
_FROZEN_HEAD_LOGITS = 2.0  # blocks of logits and derived arrays, if the head has no gradient
_REDUCED_BYTES = 64 * 2**20  # of the head's gradient that is reduced at once
_PARTS = 2.0  # parts of logits and derived arrays in kernels/cross_entropy/by_vocabulary.py

# How many arrays of each size XLA holds at once, counted in compiled programs (benchmarks/planner.py memory). Beside
# what it names, remat `none` saves the norms' float32 inputs and products, also of queries and keys if they are normed.
_NONE_HIDDEN = 6.0  # [tokens, F] of gated MLPs; two thirds without a gate
_NONE_RESIDUAL = 14.5  # [tokens, D]
_NONE_NORMED = 6.0  # queries and keys
# What a layer's backward pass holds at once: gradients of the hidden units and their operands, and so on. Fitted on 30
# November 2026 to the dense records in gin/slices and the dense rows of benchmarks/tpu_compile.py (libtpu 0.0.50), and to
# Phi-3 mini and Gemma 2 2B (0.0.42.1): of steps near what a chip holds 2% below to 3% above.
_WORK_HIDDEN, _WORK_HEADS, _WORK_RESIDUAL = 3.0, 1.0, 7.25
# Without gradients of weights fewer results wait for their products. What experts hold was fitted with the same share of
# the residual stream.
_FROZEN_HIDDEN, _UNWEIGHTED_RESIDUAL = 4.0, 2.0
_AGAIN_RESIDUAL = 3.0  # of another layer of the loop body, whose attention is made again at the same time
# Of a layer's forward pass: hidden units, and the residual stream before and after its parts, in bfloat16 and float32. Counted
# on 30 November 2026 in Gemma 3 4B on v5e-64, 4 rows (libtpu 0.0.50.1).
_FORWARD_HIDDEN, _FORWARD_RESIDUAL = 2.0, 7.0
_MOST_AGAIN = {"v5e": 2}  # layers of a loop body at once; the compiler for a v6e takes all six of Gemma 3
_GATED = 2.0  # more of the hidden units if a gated product and its gradients are stored
_WORK_RETAINED = 0.5  # of saved hidden units: the rest is read where it is saved, this is copied out for the layer
# Counted from the code of Gemma 3n; no compiled step has fitted these three yet (benchmarks/planner.py, gemma3n-e2b-*).
_NONE_STREAMS, _WORK_STREAMS = 3.0, 4.0  # [streams, tokens, D] with several residual streams
_EMBEDDED = 2.0  # embeddings kept for later layers, and their gradients
_NONE_SCORES = 2.0  # float32 attention scores without a kernel
_WORK_SCORES = 1.5
_WORK_KEYS = 3.0  # keys and values of the whole context axis, with their gradients
# Per layer weight in the compute dtype: gathered and dropped, gradients reduced, in turn. Experts' gradients are fewer
# and larger arrays.
_WORK_WEIGHTS, _WORK_EXPERTS = 0.6, 0.9
_WORK_FROZEN = 1.3  # for frozen weights: both passes of a layer over them are in the backward pass


@dataclasses.dataclass(frozen=True)
class _Order:
    """What a schedule holds of a layer's backward pass at once.

    Attributes:
      gathered: arrays [tokens, D] over a whole tensor axis, if the residual stream is sharded along it.
      expert_hidden: replaces _WORK_HIDDEN; includes copies in the order of the experts.
      logits: blocks of logits and derived arrays.
    """

    gathered: float
    expert_hidden: float
    logits: float


_USUAL, _LEAN = _Order(4.0, 5.0, 1.5), _Order(2.3, 3.3, 1.0)
_ADAPTED_HIDDEN = 2.0  # extra [rows, F] per expert weight with an adapter: its output, and the gradient
_EXCHANGED_EXPERTS = (3.0, 4.0)  # experts' inputs and outputs, and hidden units, of an expert axis
# Arrays of each offloaded result that are on their way to or from the host's memory, for one layer. Fitted on 29 November
# 2026 to Llama 3 8B and 70B and Mixtral 8x7B on v5e and v6e, with and without queries, keys and values (libtpu 0.0.42.1).
_IN_TRANSIT = 2.5


class _Held(NamedTuple):
    """What a dense layer's backward pass holds beside its hidden units and heads, if its weights are trained.

    Attributes:
      residual: arrays [tokens, D].
      normed: queries and keys before their norm.
      weights: shares of the gathered weights.
    """

    residual: float = _WORK_RESIDUAL
    normed: float = 0.0
    weights: float = _WORK_WEIGHTS


# A v5e gathers and reduces inside fusions: more weights and gradients are under way in full remat, and of the residual stream less
# is held. Counted on 30 November 2026 in the buffers of 1.1 B with 12 rows and Llama 3.1 8B with 2 (libtpu 0.0.50.1, v5e-64), and of
# capibara 1B with the 48 rows that a v5e of 16 holds.
_RECOMPUTED = {"v5e": _Held(3.5, 1.0, 1.5)}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      parameters, optimizer, average: the state, with batch and held: stored parameters, the optimizer's moments, the
        moving average.
      batch: the rows of a step.
      gradients: of all trained parameters; with accumulation those of a micro-batch, and the new sum.
      summed: with accumulation, the sum over previous micro-batches, which is read until the new one is complete.
      casts: the parameters in the compute dtype, still sharded, which XLA casts once for all layers, and copies of
        frozen ones in another layout.
      saved: what the forward pass saves for all layers.
      layer: what the backward pass of one layer holds.
      weights: a layer's gathered weights, and their gradients before reduction.
      pipeline: for stages: all rows between them with their gradient, and the sum of the layers' gradients over ticks.
      forward: of the last layer's forward pass and the gathered head, which XLA gathers while layers run that are in no loop;
        0 if all are.
      loss: gathered head, its gradient, a block of logits, the final hidden states and their gradient.
      held: what a run's loss keeps in addition: reference and engine, if it learns from rewards.
      host: saved activations in the host's memory; not part of any sum.
      scale: factor of everything but the state, learned from compiles.
      lean: whether this is for the schedule that saves memory, for lack of HBM.
    """

    parameters: float
    optimizer: float
    average: float
    batch: float
    gradients: float
    summed: float
    casts: float
    saved: float
    layer: float
    weights: float
    loss: float
    forward: float = 0.0
    pipeline: float = 0.0
    held: float = 0.0
    host: float = 0.0
    scale: float = 1.0
    lean: bool = False

    @property
    def state(self) -> float:
        return self.parameters + self.optimizer + self.average + self.batch + self.held

    @property
    def moments(self) -> dict[str, float]:
        """Bytes in use at the moments of a step that can be its peak."""
        held = self.saved + self.casts + self.summed
        return {
            "forward": self.state + self.scale * (held + self.forward),
            "loss": self.state + self.scale * (held + self.loss),
            "backward": self.state + self.scale * (held + self.gradients + self.layer + self.weights + self.pipeline),
            "update": self.state + self.scale * self.gradients,
        }

    @functools.cached_property  # a search asks for it several times
    def peak(self) -> float:
        return max(self.moments.values())

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=self.moments.__getitem__)


def memory(
    work: Workload,
    choice: Choice,
    chip: Chip,
    scale: float = 1.0,
    most_bytes: float = math.inf,
    layers: list[LayerResults] | None = None,
) -> Memory:
    """Predicts the memory of a choice.

    Args:
      work: the model and its state.
      choice: mesh, rows and remat.
      chip: what it runs on.
      scale: correction of everything but the state, learned from compiles of this model.
      most_bytes: HBM of a device that a plan may use. If the usual schedule does not fit, XLA's scheduler stops hiding
        collectives and holds less at once: that schedule is predicted then.
      layers: `results_of_layers`, which depends on mesh and rows alone; None: not known yet.
    """
    layers = layers or results_of_layers(work, choice)
    usual = _usual(work, choice, chip, layers, scale)
    if usual.peak <= most_bytes:
        return usual
    layer, loss = _layer_bytes(work, choice, chip, layers, _LEAN), _loss_bytes(work, choice, chip, _LEAN)
    weights = max(_gathered_bytes(work, stack, choice, _Held()) for stack in work.stacks)
    return dataclasses.replace(usual, layer=layer, weights=weights, loss=loss, lean=True)


def host_bytes(work: Workload, choice: Choice) -> float:
    """Saved activations in the host's memory, of one device."""
    layers = results_of_layers(work, choice)
    return sum(_in_all_layers(layer.stack, choice) * saved_bytes(work, layer, choice)[1] for layer in layers)


def _tied_head_padding(work: Workload, choice: Choice, chip: Chip) -> float:
    """What the head's gradient takes beside its elements, if the embedding's is added to it: it is stored by rows then."""
    if not (chip.is_tpu and work.model.trains_head and work.config.head is Head.TIED):
        return 0.0
    width = work.config.embed_dim // math.prod(choice.mesh[axis] for axis in work.rules.embed)
    return work.config.vocab_size / choice.mesh["tensor"] * (-width % LANES) * 4


def _in_all_layers(stack: Stack, choice: Choice) -> float:
    """How often a device holds what one layer saves."""
    return stack.layers / choice.mesh["stage"] * _in_flight(choice)


def _usual(work: Workload, choice: Choice, chip: Chip, layers: list[LayerResults], scale: float) -> Memory:
    mesh, size = choice.mesh, work.compute_bytes
    parameters, trained = work.params.in_memory(mesh, chip), work.trained.in_memory(mesh, chip)
    saved = host = weights = pipeline = 0.0
    for results in layers:
        device, away = saved_bytes(work, results, choice)
        stack, times = results.stack, _in_all_layers(results.stack, choice)
        saved, host = saved + times * device, host + times * away
        weights = max(weights, _gathered_bytes(work, stack, choice, _held(work, choice, chip)))
        pipeline = max(pipeline, _pipeline_bytes(work, stack, choice))
    embedded = _EMBEDDED * work.config.embedded_dim * size / mesh["tensor"]
    saved += embedded * choice.rows * work.length / mesh["context"]
    encoder, summed = work.encoder_length or 0, choice.accumulation > 1
    return Memory(
        parameters=parameters,
        optimizer=work.state[choice.state_dtype].in_memory(mesh, chip),
        average=trained if work.ema else 0.0,
        batch=choice.rows * choice.accumulation * (work.length * 5 + encoder * 3) * 4.0,
        gradients=trained * (2 if summed else 1) + _tied_head_padding(work, choice, chip),
        summed=trained if summed else 0.0,
        casts=work.relaid.in_memory(mesh, chip) + (work.casts.in_memory(mesh, chip) / 4 * size if size < 4 else 0.0),
        saved=saved,
        layer=_layer_bytes(work, choice, chip, layers, _USUAL),
        weights=weights,
        forward=_forward_bytes(work, choice, layers[-1], weights),
        loss=_loss_bytes(work, choice, chip, _USUAL),
        pipeline=pipeline,
        held=work.held.in_memory(mesh, chip),
        host=host,
        scale=scale,
    )


def kv_cache_bytes(work: Workload, choice: Choice, rows: int = 1) -> float:
    """What generation caches of rows of the run's length, on one device: keys and values, and states of recurrent layers.

    Not part of a train step: sampling during training, and serving, need it in addition to the parameters.
    """
    model, tensor = work.model, choice.mesh["tensor"]
    if model.empty_cache is None:
        return 0.0
    cache = jax.eval_shape(lambda: model.start_cache(rows, work.length, encoder_length=work.encoder_length))
    total = 0.0
    for layer, axes in zip(cache["layers"], paged.axes(cache)["layers"], strict=True):
        for name, array in layer.items():
            heads_are_shared_out = "act_kv_heads" in axes[name] and array.shape[1] % tensor == 0
            total += array.size * array.dtype.itemsize / (tensor if heads_are_shared_out else 1)
    return total / choice.mesh["stage"]


def _in_flight(choice: Choice) -> float:
    """Micro-batch passes that wait for their backward pass in a pipeline, including those in its bubbles."""
    stages = choice.mesh["stage"]
    parts = choice.pipeline_microbatches
    return (parts + stages - 1) / parts


def device_tokens(work: Workload, stack: Stack, choice: Choice) -> float:
    """Tokens of a micro-batch on one device, except in the parts that the tensor axis shards by time."""
    return choice.rows * stack.length / choice.mesh["context"]


# Results as wide as an MLP's hidden layer.
_HIDDEN = tuple(
    projection.result for projection in projections.MLP + projections.EXPERTS if projection.out_axes == ("mlp",)
)


def saved_bytes(work: Workload, results: LayerResults, choice: Choice) -> tuple[float, float]:
    """What one layer saves for its backward pass: bytes on the device and in the host's memory."""
    stack, named, residual, hidden = results
    remat, carried = choice.remat, work.config.streams * residual
    if remat.kind is Remat.FULL:
        return carried, 0.0
    if remat.kind is Remat.NONE:
        share = 1.0 if work.config.activation.gated else 2 / 3
        heads = named["query"] + named["key"] + named["value"] + named["attention"]
        normed = _NONE_NORMED * (named["query"] + named["key"]) if str(work.config.qk_norm) != "none" else 0.0
        scores = _NONE_SCORES * _scores_bytes(work, stack, choice)
        streams = _NONE_STREAMS * carried if work.config.streams > 1 else 0.0
        # The result of attention is saved as the kernel stores it, and as the next product reads it where they differ.
        padding = _lane_padding(work, stack)
        twice = named["attention"] / padding if padding > 1 else 0.0
        residuals = _NONE_RESIDUAL * residual + streams + heads + twice
        return residuals + normed + _NONE_HIDDEN * share * hidden + scores, 0.0
    retained = sum(named.get(name, 0.0) for name in _kept_names(remat))
    if remat.kind in (Remat.DOTS, Remat.MINIMAL) and str(work.config.norm_placement) != "pre":
        retained += residual  # the next norm reads the last product again
    if remat.kind is not Remat.OFFLOAD:
        return carried + retained, 0.0
    return (0.0, retained + carried) if projections.LAYER_INPUT in remat.names else (carried, retained)


def _kept_names(remat: RematPolicy) -> tuple[str, ...]:
    if remat.kind is Remat.FULL:
        return ()
    if remat.kind in (Remat.SAVE, Remat.OFFLOAD):
        return remat.names
    # The last product of a layer is saved by name, but nothing reads it, so XLA removes it.
    return projections.NEEDED


# Results of an attention: name -> logical axes.
_ATTENTION_AXES = {item.result: item.out_axes for item in projections.ATTENTION if item.result}
_ATTENTION_AXES[projections.ATTENDED] = projections.QUERY.out_axes


class LayerResults(NamedTuple):
    """Bytes of one layer's results on one device.

    Attributes:
      stack: of the layer.
      named: by their names in Plan.remat_names.
      residual: of the residual stream.
      hidden: of the hidden units.
    """

    stack: Stack
    named: Mapping[str, float]
    residual: float
    hidden: float


def results_of_layers(work: Workload, choice: Choice) -> list[LayerResults]:
    """What one layer of each stack computes."""
    return [layer_results(work, stack, choice) for stack in work.stacks]


def layer_results(work: Workload, stack: Stack, choice: Choice) -> LayerResults:
    """What one layer computes."""
    c, mesh, size = work.config, choice.mesh, work.compute_bytes
    n = device_tokens(work, stack, choice)
    tensor = mesh["tensor"]
    residual = n * c.embed_dim * size / tensor
    heads = n * c.num_heads * c.head_size * size / tensor
    kv = n * c.kv_heads * c.head_size * size / tensor
    attentions = len(stack.attentions)
    padding = _lane_padding(work, stack)
    sizes: dict[projections.Axes, float] = {projections.QUERY.out_axes: padding * heads}
    sizes |= {projections.KEY.out_axes: padding * kv, projections.OUT.out_axes: residual}
    named = {name: sizes[axes] * attentions for name, axes in _ATTENTION_AXES.items()}
    routed = _expert_rows(work, stack, choice)
    hidden = (n if c.moe is None else routed) * work.expert_dim * size / tensor
    kind = "mlp" if c.moe is None else "expert"
    named |= {f"{kind}_up": hidden} | ({f"{kind}_gate": hidden} if c.activation.gated else {})
    named |= {} if c.moe is None else {"expert_down": routed * c.embed_dim * size}
    return LayerResults(stack, named, residual, hidden)


def _lane_padding(work: Workload, stack: Stack) -> float:
    """What arrays [.., heads, head_dim] take over their elements: they are stored in tiles of 128 lanes."""
    padding = -(-work.config.head_size // LANES) * LANES / work.config.head_size
    by_kernel = sum(not a.scores for a in stack.attentions) / len(stack.attentions)
    return 1 + (padding - 1) * by_kernel  # for the kernel's operands; XLA chooses other layouts otherwise


def _scores_bytes(work: Workload, stack: Stack, choice: Choice) -> float:
    """Float32 scores of one layer, if no kernel avoids materialising them."""
    heads = work.config.num_heads / choice.mesh["tensor"]
    return choice.rows * heads * sum(a.scores for a in stack.attentions) / choice.mesh["context"] * 4


def _expert_rows(work: Workload, stack: Stack, choice: Choice) -> float:
    """Rows that one device's experts process, by the size of the buffer."""
    moe, mesh = work.config.moe, choice.mesh
    if moe is None:
        return 0.0
    n = device_tokens(work, stack, choice)
    if str(moe.dispatch) == "capacity":
        return n * moe.top_k * moe.capacity_factor
    # Without a capacity a device needs room for all tokens of its expert axis, whichever experts they choose.
    return n * mesh["expert"] * min(moe.top_k, moe.num_experts / mesh["expert"])


def _held(work: Workload, choice: Choice, chip: Chip) -> _Held:
    weighted = work.config.moe is None and work.config.lora is None
    recomputed = choice.remat.kind in (Remat.FULL, Remat.SAVE) and not {*_kept_names(choice.remat)} - {
        projections.LAYER_INPUT
    }
    return _RECOMPUTED.get(chip.name, _Held()) if weighted and recomputed else _Held()


def _layer_bytes(work: Workload, choice: Choice, chip: Chip, layers: list[LayerResults], order: _Order) -> float:
    # A stage processes one part of the rows at a time.
    parts = choice.pipeline_microbatches
    return max(_stack_layer_bytes(work, results, choice, chip, order) for results in layers) / parts


def _stack_layer_bytes(work: Workload, results: LayerResults, choice: Choice, chip: Chip, order: _Order) -> float:
    stack, named, residual, hidden = results
    heads = named["query"] + named["key"] + named["value"] + named["attention"]
    moe = named.get("expert_down", 0.0)
    share = 1.0 if work.config.activation.gated else 2 / 3
    # What was saved is not recomputed.
    retained = _kept_names(choice.remat)
    weighted = work.config.moe is None and work.config.lora is None
    most = _WORK_HIDDEN if weighted else _FROZEN_HIDDEN
    if work.config.moe is not None:
        moe, most = 2 * moe, order.expert_hidden
        if choice.mesh["expert"] > 1:  # rows sent to the experts' devices and back are held until the layer is done
            padded = -(-choice.rows // SUBLANES) * SUBLANES / choice.rows if choice.rows > SUBLANES else 1.0
            exchanged, most = _EXCHANGED_EXPERTS
            hidden, moe = hidden * padded, exchanged / 2 * moe * padded
        most += _ADAPTED_HIDDEN * stack.adapted_experts
    in_place = 1.0 if work.config.moe is not None else 1.0 - _WORK_RETAINED
    again = most * share * hidden - in_place * sum(named.get(name, 0.0) for name in retained if name in _HIDDEN)
    gathered = order.gathered * residual * choice.mesh["tensor"] if choice.mesh["tensor"] > 1 else 0.0
    keys = (named["key"] + named["value"]) * choice.mesh["context"] if choice.mesh["context"] > 1 else 0.0
    shared = gathered + _WORK_KEYS * keys + _WORK_SCORES * _scores_bytes(work, stack, choice)
    streams = _WORK_STREAMS * work.config.streams * residual if work.config.streams > 1 else 0.0
    in_transit = _IN_TRANSIT * saved_bytes(work, results, choice)[1]
    held = _held(work, choice, chip)
    shown = held == _Held() or order is _LEAN  # else the weights under way in another moment are more
    if weighted and shown and _stores_gated(work, stack, choice, chip):
        again += _GATED * hidden
    again += _WORK_HEADS * heads + (held.residual if weighted else _UNWEIGHTED_RESIDUAL) * residual
    again += held.normed * (named["query"] + named["key"]) if str(work.config.qk_norm) != "none" else 0.0
    # XLA computes the attention of several layers of one loop body again at once; their hidden units one after the other.
    again += (_layers_at_once(work, choice, chip) - 1) * (_WORK_HEADS * heads + _AGAIN_RESIDUAL * residual)
    return again + streams + shared + moe + in_transit


def _forward_bytes(work: Workload, choice: Choice, results: LayerResults, weights: float) -> float:
    """What the last layer's forward pass holds, with the head, if it runs after the loop: a loop has whole patterns."""
    c, mesh = work.config, choice.mesh
    stack, named, residual, hidden = results
    pattern = len(getattr(c, "layer_pattern", (None,)))
    if stack.name != "decoder" or mesh["stage"] > 1 or stack.layers % pattern == 0:
        return 0.0
    heads = named["query"] + named["key"] + named["value"] + named["attention"]
    layer = _FORWARD_HIDDEN * hidden + heads + _FORWARD_RESIDUAL * residual + weights
    return layer + c.vocab_size / mesh["tensor"] * c.embed_dim * work.compute_bytes


def _stores_gated(work: Workload, stack: Stack, choice: Choice, chip: Chip) -> bool:
    """Whether the gated product and its gradients are computed once (kernels/gate.py)."""
    tokens = device_tokens(work, stack, choice) / choice.pipeline_microbatches
    return str(work.config.activation) == "swiglu" and few_tokens(chip.kind, tokens, work.config.mlp_dim)


def _layers_at_once(work: Workload, choice: Choice, chip: Chip) -> int:
    """Layers of one loop body whose attention the backward pass makes again."""
    made_again = choice.remat.kind is not Remat.NONE and "query" not in _kept_names(choice.remat)
    layers = len(getattr(work.config, "layer_pattern", (None,))) if made_again else 1
    return min(layers, _MOST_AGAIN.get(chip.name, layers))


def _gathered_bytes(work: Workload, stack: Stack, choice: Choice, held: _Held) -> float:
    """Bytes of one layer's weights in the compute dtype, gathered except along the tensor and expert axes."""
    mesh, rules = choice.mesh, work.rules
    device_weights = stack.weights.on_device(mesh, without=(*rules.embed, *rules.layers))
    experts = stack.expert_weights.on_device(mesh, without=(*rules.expert_embed, *rules.layers))
    share = held.weights if work.config.lora is None else _WORK_FROZEN
    return (share * device_weights + _WORK_EXPERTS * experts) / stack.layers * work.compute_bytes


def _pipeline_bytes(work: Workload, stack: Stack, choice: Choice) -> float:
    """What a pipeline's backward pass holds beside a stage's own work (models/layers/pipeline.py)."""
    if choice.mesh["stage"] == 1:
        return 0.0
    rows = device_tokens(work, stack, choice) * work.config.embed_dim * work.compute_bytes / choice.mesh["tensor"]
    gradients = (stack.weights.on_device(choice.mesh) + stack.expert_weights.on_device(choice.mesh)) * 4
    return 2 * rows + (gradients if work.config.lora is None else work.trained.on_device(choice.mesh))


def _loss_bytes(work: Workload, choice: Choice, chip: Chip, order: _Order) -> float:
    """The loss's memory, following kernels/cross_entropy."""
    c, mesh, size = work.config, choice.mesh, work.compute_bytes
    n = choice.rows * work.length / mesh["context"] / mesh["stage"]
    V, D = c.vocab_size / mesh["tensor"], c.embed_dim
    block = min(LOGITS_BYTES, n * V * 4 / FEWEST_BLOCKS)
    shards = math.prod(mesh[axis] for axis in work.rules.embed)
    if work.model.trains_head and by_vocabulary_on(chip.platform, V, D):
        shards = shards if D % shards == 0 else 1  # else the head is whole on each device
        padded = math.ceil(D / shards / SUBLANES) * SUBLANES * shards
        part = 4 * max(n, D) * min(V, by_vocabulary.part_ids(math.ceil(n), D, chip.kind))
        return V * padded * size + V * D * 4 / shards + _PARTS * part + n * D * (2 * size + 4)
    gradient = n * V * size if n * size < 4 * D and shards > 1 else V * D * 4
    piece = min(_REDUCED_BYTES, V * D * 4) if shards > 1 else 0.0
    logits = order.logits
    if not work.model.trains_head:
        gradient = piece = 0.0
        logits = max(logits, _FROZEN_HEAD_LOGITS)
    return V * D * size + gradient + max(logits * block, 2 * piece) + 2 * n * D * size
