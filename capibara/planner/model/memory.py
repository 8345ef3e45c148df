"""HBM that a train step needs on one device, part by part: a prediction, which a compile of the step proves or mends.

The peak is the largest of three moments: when the loss is made (all saved activations, no gradients of layers yet),
in the backward pass of the layers (saved activations, all gradients, and what one layer makes again), and in the update.
"""

from __future__ import annotations

import dataclasses
import math

from capibara.planner.model.workload import Stack, Workload
from capibara.planner.search.choice import Choice
from capibara.sharding import Remat, RematPolicy

# Logits of one block, as kernels/cross_entropy.py makes them on TPU: at most so many bytes, at least so many blocks.
_LOGITS_BYTES, _FEWEST_BLOCKS = 256 * 2**20, 4
_FROZEN_HEAD_LOGITS = 2.0  # blocks of logits where the head has no gradient, with what is made of them
_REDUCED_BYTES = 64 * 2**20  # of the head's gradient that is reduced at once

_LANES = 128  # of a TPU's vector registers
# How many arrays of its size XLA holds at once, counted in compiled programs (benchmarks/planner.py memory). Remat `none`
# keeps beside what it names the norms' float32 inputs and products, of queries and keys too where these are normed.
_NONE_HIDDEN = 6.0  # [tokens, F], of gated MLPs; two thirds where there is no gate
_NONE_RESIDUAL = 14.5  # [tokens, D]
_NONE_NORMED = 6.0  # queries and keys
# What a layer's backward pass holds at once: gradients of the hidden units with what they are made of, and so on.
_WORK_HIDDEN, _WORK_HEADS, _WORK_RESIDUAL = 4.0, 1.0, 2.0
_NONE_STREAMS, _WORK_STREAMS = 3.0, 4.0  # [streams, tokens, D], where there are several
_EMBEDDED = 2.0  # embeddings that wait for their layers, and their gradients
_NONE_SCORES = 2.0  # float32 scores of attention that no kernel takes
_WORK_SCORES = 1.5
_WORK_KEYS = 3.0  # keys and values of all of a context axis, with their gradients
# Of a layer's weights in the compute dtype: gathered and dropped, their gradients reduced, in turn. Experts' gradients
# are fewer and larger arrays.
_WORK_WEIGHTS, _WORK_EXPERTS = 0.6, 0.9
_WORK_FROZEN = 1.3  # of weights without gradients: both passes of a layer over them are in the backward pass


@dataclasses.dataclass(frozen=True)
class _Order:
    """What an order of work holds of a layer's backward pass at once.

    Attributes:
      gathered: [tokens, D] of all of a tensor axis, where the residual stream is shared out along it.
      expert_hidden: in place of _WORK_HIDDEN, with copies in the order of the experts.
      logits: blocks of logits, with what is made of them.
    """

    gathered: float
    expert_hidden: float
    logits: float


_USUAL, _LEAN = _Order(4.0, 5.0, 1.5), _Order(2.3, 3.3, 1.0)
_ADAPTED_HIDDEN = 2.0  # [rows, F] more for each weight of experts with an adapter: what either made, and its gradient
_EXCHANGED_EXPERTS = (3.0, 4.0)  # experts' inputs and outputs, and hidden units, of an expert axis
_SUBLANES = 8  # rows that are exchanged, where there are more, are padded to multiples of these


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      parameters, optimizer, average: the state, with batch and held: parameters as they are stored, the optimizer's
        moments, the average.
      batch: the rows of a step.
      gradients: of all that is trained; with accumulation those of a micro-batch, and the new sum that they are added into.
      summed: with accumulation the sum over the micro-batches before, which is read until the new one is made.
      casts: the parameters in the compute dtype, still sharded, which XLA makes once for all layers, and copies of
        frozen ones in another layout.
      saved: what the forward pass keeps of all layers.
      layer: what the backward pass of one layer holds.
      weights: of a layer, gathered, and their gradients before they are reduced.
      pipeline: of stages: all rows between them and their gradient, and the sum of the layers' gradients over ticks.
      loss: gathered head, its gradient, a block of logits, the final hidden states and their gradient.
      held: what a run's loss keeps beside all that: the reference and the engine of one that learns from rewards.
      host: saved activations in the host's memory; in none of the sums.
      scale: what everything but the state is multiplied with, learned from compiles.
      lean: whether this is of an order of work that holds less, for want of HBM.
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
            "loss": self.state + self.scale * (held + self.loss),
            "backward": self.state + self.scale * (held + self.gradients + self.layer + self.weights + self.pipeline),
            "update": self.state + self.scale * self.gradients,
        }

    @property
    def peak(self) -> float:
        return max(self.moments.values())

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=self.moments.__getitem__)


def memory(work: Workload, choice: Choice, scale: float = 1.0, most_bytes: float = math.inf) -> Memory:
    """The prediction.

    Args:
      work: the model and its state.
      choice: mesh, rows and remat.
      scale: correction of everything but the state, as compiles of this model have shown it.
      most_bytes: what a plan may use of a device's HBM. Where the usual order of work does not fit, XLA's scheduler
        gives up hiding collectives for one that holds less at once: that one is predicted then.
    """
    usual = _usual(work, choice, scale)
    if usual.peak <= most_bytes:
        return usual
    layer, loss = _layer_bytes(work, choice, _LEAN), _loss_bytes(work, choice, _LEAN)
    return dataclasses.replace(usual, layer=layer, loss=loss, lean=True)


def _usual(work: Workload, choice: Choice, scale: float) -> Memory:
    mesh, size = choice.mesh, work.compute_bytes
    parameters, trained = work.params.on_device(mesh), work.trained.on_device(mesh)
    saved = host = weights = pipeline = 0.0
    for stack in work.stacks:
        device, away = saved_bytes(work, stack, choice)
        layers = stack.layers / mesh["stage"] * _in_flight(choice)
        saved, host = saved + layers * device, host + layers * away
        weights = max(weights, _gathered_bytes(work, stack, choice))
        pipeline = max(pipeline, _pipeline_bytes(work, stack, choice))
    embedded = _EMBEDDED * work.config.embedded_dim * size / mesh["tensor"]
    saved += embedded * choice.rows * work.length / mesh["context"]
    encoder, summed = work.encoder_length or 0, choice.accumulation > 1
    return Memory(
        parameters=parameters,
        optimizer=work.state[choice.state_dtype].on_device(mesh),
        average=trained if work.ema else 0.0,
        batch=choice.rows * choice.accumulation * (work.length * 5 + encoder * 3) * 4.0,
        gradients=trained * (2 if summed else 1),
        summed=trained if summed else 0.0,
        casts=work.relaid.on_device(mesh) + (work.casts.on_device(mesh) / 4 * size if size < 4 else 0.0),
        saved=saved,
        layer=_layer_bytes(work, choice, _USUAL),
        weights=weights,
        loss=_loss_bytes(work, choice, _USUAL),
        pipeline=pipeline,
        held=work.held.on_device(mesh),
        host=host,
        scale=scale,
    )


def kv_cache_bytes(work: Workload, choice: Choice, rows: int = 1) -> float:
    """Keys and values of whole rows on one device, as generation keeps them: [layers, rows, length, 2, K, H].

    They are no part of a train step: sampling during training and serving have them beside the parameters.
    """
    c, mesh = work.config, choice.mesh
    layers = sum(c.kv_layers * len(stack.attentions) for stack in work.stacks if stack.name == "decoder")
    keys = layers * rows * work.length * 2 * c.kv_heads * c.head_size
    return keys * work.compute_bytes / (mesh["tensor"] * mesh["stage"])


def _in_flight(choice: Choice) -> float:
    """Passes of a micro-batch's rows that wait for their backward pass, in a pipeline with what fills its bubbles."""
    stages = choice.mesh["stage"]
    parts = choice.pipeline_microbatches
    return (parts + stages - 1) / parts


def places(work: Workload, stack: Stack, choice: Choice) -> float:
    """Places of a micro-batch on one device, outside of the parts that the tensor axis shares out by time."""
    return choice.rows * stack.length / choice.mesh["context"]


def saved_bytes(work: Workload, stack: Stack, choice: Choice) -> tuple[float, float]:
    """What one layer keeps for its backward pass: bytes on the device and in the host's memory."""
    named, residual, hidden = _results(work, stack, choice)
    remat, carried = choice.remat, work.config.streams * residual
    if remat.kind is Remat.FULL:
        return carried, 0.0
    if remat.kind is Remat.NONE:
        share = 1.0 if work.config.activation.gated else 2 / 3
        heads = named["query"] + named["key"] + named["value"] + named["attention"]
        normed = _NONE_NORMED * (named["query"] + named["key"]) if str(work.config.qk_norm) != "none" else 0.0
        scores = _NONE_SCORES * _scores_bytes(work, stack, choice)
        streams = _NONE_STREAMS * carried if work.config.streams > 1 else 0.0
        return _NONE_RESIDUAL * residual + streams + heads + normed + _NONE_HIDDEN * share * hidden + scores, 0.0
    # Arrays [.., heads, head_dim] lie in tiles of 128 lanes: smaller heads are kept with as much padding.
    padding = -(-work.config.head_size // _LANES) * _LANES / work.config.head_size
    by_kernel = sum(not a.scores for a in stack.attentions) / len(stack.attentions)
    padding = 1 + (padding - 1) * by_kernel  # the kernel's operands; XLA lays out its own otherwise
    padded = {name: named[name] * padding for name in ("query", "key", "value", "attention")}
    kept = sum((named | padded).get(name, 0.0) for name in _kept_names(remat))
    if remat.kind in (Remat.DOTS, Remat.MINIMAL) and str(work.config.norm_placement) != "pre":
        kept += residual  # the last product is read again, by the norm behind it
    return (carried, kept) if remat.kind is Remat.OFFLOAD else (carried + kept, 0.0)


def _kept_names(remat: RematPolicy) -> tuple[str, ...]:
    if remat.kind is Remat.FULL:
        return ()
    if remat.kind in (Remat.SAVE, Remat.OFFLOAD):
        return remat.names
    # The last product of a layer is kept by name, but nothing reads it again, so XLA drops it.
    return ("query", "key", "value", "attention_out", "mlp_up", "mlp_gate", "expert_up", "expert_gate", "expert_down")


def _results(work: Workload, stack: Stack, choice: Choice) -> tuple[dict[str, float], float, float]:
    """Bytes of one layer's results: by name, of the residual stream, and of the hidden units."""
    c, mesh, size = work.config, choice.mesh, work.compute_bytes
    n = places(work, stack, choice)
    tensor = mesh["tensor"]
    residual = n * c.embed_dim * size / tensor
    heads = n * c.num_heads * c.head_size * size / tensor
    kv = n * c.kv_heads * c.head_size * size / tensor
    attentions = len(stack.attentions)
    named = {"query": heads, "key": kv, "value": kv, "attention": heads, "attention_out": residual}
    named = {name: amount * attentions for name, amount in named.items()}
    routed = _expert_rows(work, stack, choice)
    hidden = (n if c.moe is None else routed) * work.expert_dim * size / tensor
    kind = "mlp" if c.moe is None else "expert"
    named |= {f"{kind}_up": hidden} | ({f"{kind}_gate": hidden} if c.activation.gated else {})
    return named | ({} if c.moe is None else {"expert_down": routed * c.embed_dim * size}), residual, hidden


def _scores_bytes(work: Workload, stack: Stack, choice: Choice) -> float:
    """Float32 scores of one layer that no kernel keeps from being made."""
    heads = work.config.num_heads / choice.mesh["tensor"]
    return choice.rows * heads * sum(a.scores for a in stack.attentions) / choice.mesh["context"] * 4


def _expert_rows(work: Workload, stack: Stack, choice: Choice) -> float:
    """Rows that one device's experts work on, of the buffer's size."""
    moe, mesh = work.config.moe, choice.mesh
    if moe is None:
        return 0.0
    n = places(work, stack, choice)
    if str(moe.dispatch) == "capacity":
        return n * moe.top_k * moe.capacity_factor
    # Without a capacity a device must have room for all tokens of its expert axis, whichever experts they choose.
    return n * mesh["expert"] * min(moe.top_k, moe.num_experts / mesh["expert"])


def _layer_bytes(work: Workload, choice: Choice, order: _Order) -> float:
    # A stage works on one part of the rows at a time.
    return max(_stack_layer_bytes(work, stack, choice, order) for stack in work.stacks) / choice.pipeline_microbatches


def _stack_layer_bytes(work: Workload, stack: Stack, choice: Choice, order: _Order) -> float:
    named, residual, hidden = _results(work, stack, choice)
    heads = named["query"] + named["key"] + named["value"] + named["attention"]
    moe = named.get("expert_down", 0.0)
    share = 1.0 if work.config.activation.gated else 2 / 3
    # What was kept is not made again.
    kept = _kept_names(choice.remat)
    most = _WORK_HIDDEN
    if work.config.moe is not None:
        moe, most = 2 * moe, order.expert_hidden
        if choice.mesh["expert"] > 1:  # what goes to the experts' devices and comes back lies there until it is done
            padded = -(-choice.rows // _SUBLANES) * _SUBLANES / choice.rows if choice.rows > _SUBLANES else 1.0
            exchanged, most = _EXCHANGED_EXPERTS
            hidden, moe = hidden * padded, exchanged / 2 * moe * padded
        most += _ADAPTED_HIDDEN * stack.adapted_experts
    again = most * share * hidden - sum(named.get(name, 0.0) for name in kept if name.endswith(("up", "gate")))
    gathered = order.gathered * residual * choice.mesh["tensor"] if choice.mesh["tensor"] > 1 else 0.0
    keys = (named["key"] + named["value"]) * choice.mesh["context"] if choice.mesh["context"] > 1 else 0.0
    shared = gathered + _WORK_KEYS * keys + _WORK_SCORES * _scores_bytes(work, stack, choice)
    streams = _WORK_STREAMS * work.config.streams * residual if work.config.streams > 1 else 0.0
    return again + _WORK_HEADS * heads + _WORK_RESIDUAL * residual + streams + shared + moe


def _gathered_bytes(work: Workload, stack: Stack, choice: Choice) -> float:
    """What is held of one layer's weights in the compute dtype, whole but for the tensor axis and the experts' own."""
    mesh, rules = choice.mesh, work.rules
    own = stack.weights.on_device(mesh, without=(*rules.embed, *rules.layers))
    experts = stack.expert_weights.on_device(mesh, without=(*rules.expert_embed, *rules.layers))
    share = _WORK_WEIGHTS if work.config.lora is None else _WORK_FROZEN
    return (share * own + _WORK_EXPERTS * experts) / stack.layers * work.compute_bytes


def _pipeline_bytes(work: Workload, stack: Stack, choice: Choice) -> float:
    """What a pipeline's backward pass holds beside a stage's own work (models/layers/pipeline.py)."""
    if choice.mesh["stage"] == 1:
        return 0.0
    rows = places(work, stack, choice) * work.config.embed_dim * work.compute_bytes / choice.mesh["tensor"]
    gradients = (stack.weights.on_device(choice.mesh) + stack.expert_weights.on_device(choice.mesh)) * 4
    return 2 * rows + (gradients if work.config.lora is None else work.trained.on_device(choice.mesh))


def _loss_bytes(work: Workload, choice: Choice, order: _Order) -> float:
    """As kernels/cross_entropy.py goes about it."""
    c, mesh, size = work.config, choice.mesh, work.compute_bytes
    n = choice.rows * work.length / mesh["context"] / mesh["stage"]
    V, D = c.vocab_size / mesh["tensor"], c.embed_dim
    block = min(_LOGITS_BYTES, n * V * 4 / _FEWEST_BLOCKS)
    shards = math.prod(mesh[axis] for axis in work.rules.embed)
    gradient = n * V * size if n * size < 4 * D and shards > 1 else V * D * 4
    piece = min(_REDUCED_BYTES, V * D * 4) if shards > 1 else 0.0
    logits = order.logits
    if not work.model.trains_head:
        gradient = piece = 0.0
        logits = max(logits, _FROZEN_HEAD_LOGITS)
    return V * D * size + gradient + max(logits * block, 2 * piece) + 2 * n * D * size
