"""A mixture of experts in place of an MLP (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from capibara import sharding
from capibara.core import projections
from capibara.kernels.grouped_matmul.dispatch import lays_out_gathered
from capibara.kernels.grouped_matmul.kernel import Transposed
from capibara.models.adapters.lora import Adapter
from capibara.models.adapters.lora_experts import Factors, Weight, in_compute_dtype, placed
from capibara.models.layers import layers, usage
from capibara.models.parts import dispatch, router
from capibara.models.parts.config import TransformerConfig
from capibara.models.parts.router import (
    Choice,
    Combination,
    Correction,
    Dispatch,
    ExpertChoice,
    Gates,
    Hints,
    Moe,
    MoeBias,
    OutputNorm,
    Remix,
    Routing,
    Score,
    SharedGate,
    Stats,
    Weighted,
)
from capibara.sharding import constrain

__all__ = [
    "Dispatch",
    "Gates",
    "Hints",
    "Moe",
    "MoeBias",
    "MoeMLP",
    "Routing",
    "Score",
    "router_loss",
    "router_metrics",
]


_HIDDEN_BIASES = ("up_bias", "gate_bias")
_Routed = tuple[jax.Array, ...]
"""The arrays of an ExpertChoice, or of a Choice, with its positions in the experts between them if there is a capacity."""


class MoeMLP(nnx.Module):
    """Experts, each an MLP as configured, and the router that chooses some of them for every token.

    Experts' products are in the compute dtype whatever TransformerConfig.quantization is. Where it is `hashed`, a table chooses
    them by the token's id.
    """

    def __init__(self, config: TransformerConfig, moe: Moe, rngs: nnx.Rngs, hashed: bool = False):
        D, E = config.embed_dim, moe.num_experts
        F = config.mlp_dim if moe.expert_dim is None else moe.expert_dim
        self.config, self.moe = config, moe
        self.router = layers.param(rngs, (D, E), ("router", "router"), layers.fan_in(0))
        gated, branches = config.activation.gated, 0.5 / config.num_layers
        self.up = layers.projection(rngs, projections.EXPERT_UP, (E, D, F))
        if gated:
            self.gate = layers.projection(rngs, projections.EXPERT_GATE, (E, D, F))
        self.down = layers.projection(rngs, projections.EXPERT_DOWN, (E, F, D), branches)
        if moe.bias is MoeBias.ALL:
            self.router_bias = layers.param(rngs, (E,), ("router",), layers.zeros)
            if gated:
                self.gate_bias = layers.param(rngs, (E, F), ("experts", "mlp"), layers.zeros)
        if self.has_biases:
            self.up_bias = layers.param(rngs, (E, F), ("experts", "mlp"), layers.zeros)
            self.down_bias = layers.param(rngs, (E, D), ("experts", "norm"), layers.zeros)
        if moe.shared_experts:
            shared = moe.shared_experts * (F if moe.shared_dim is None else moe.shared_dim)
            for item in (projections.SHARED_UP, projections.SHARED_GATE)[: 1 + gated]:
                setattr(self, item.name, layers.projection(rngs, item, (D, shared)))
            self.shared_down = layers.projection(rngs, projections.SHARED_DOWN, (shared, D), branches)
        if moe.shared_gate is SharedGate.SIGMOID:
            self.shared_switch = layers.param(rngs, (D, 1), ("router", "router"), layers.fan_in(0))
        if hashed:
            shape = (config.vocab_size, moe.top_k)
            self.expert_table = layers.param(rngs, shape, ("vocab", "router"), _evenly(E))
        elif moe.correction is not Correction.NONE:
            self.correction = layers.param(rngs, (E,), ("router",), layers.zeros)
        if moe.output_norm is OutputNorm.LAYER:
            self.output_norm = config.make_norm(rngs)

    @property
    def has_biases(self) -> bool:
        """Whether the experts' projections have biases."""
        return self.config.bias.of_mlp or self.moe.bias is MoeBias.ALL

    def __call__(
        self,
        x_BTD: jax.Array,
        segment_ids_BT: jax.Array,
        domains_BT: jax.Array | None = None,
        step: jax.Array | None = None,
        row_positions_T: jax.Array | None = None,
        remix: Remix | None = None,
        tokens_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Stats]:
        """Applies the layer.

        Args:
          x_BTD: input.
          segment_ids_BT: 0 marks padding, which is not routed and yields 0.
          domains_BT: int32 domain of each token, counted from 1; 0 or None: unknown.
          step: the train step, which sets the weight of the hints; None: evaluation, without hints.
          row_positions_T: column of each token in the row before sharding.balanced; None: in order. Capacity is
            assigned in this order.
          remix: scores that are mixed into those of some tokens.
          tokens_BT: ids of the tokens, where a table chooses by them.

        Returns:
          [B, T, D], and the statistics of `router.choose`, with `domain_load` where there are domains.
        """
        moe = self.moe
        # In float32 on TPU too, where the default for a product is bfloat16: small errors flip choices.
        with jax.default_matmul_precision("highest"):
            x32_BTD, router_lora = self.router_inputs(x_BTD), layers.adapter_of(self, "router")
            logits = jnp.einsum("BTD,DE->BTE", x32_BTD, self.router[...])
            if router_lora is not None:
                logits = router_lora(x32_BTD, logits, self.router[...])
        if moe.bias is MoeBias.ALL:
            logits = logits + self.router_bias[...]
        if moe.logit_cap is not None:
            logits = moe.logit_cap * jnp.tanh(logits / moe.logit_cap)
        logits = constrain(logits, ("batch", "act_time", None))
        real_BT = segment_ids_BT > 0
        hint = router.hint_of(moe, domains_BT, step)
        choice, stats = router.choose(logits, real_BT, moe, hint, self._correction, remix, _of_table(self, tokens_BT))
        if moe.hints is not None and domains_BT is not None:
            stats["domain_load"] = router.domain_load(logits, real_BT, domains_BT, moe.hints)
        positions_BTk = None
        if isinstance(choice, Choice) and moe.has_capacity:
            choice, positions_BTk, stats["dropped"] = _within_capacity(choice, moe, row_positions_T)
        y = self.weighted_sum(x_BTD, choice, positions_BTk)
        if (domains := usage.domains()) is not None:
            ranks = _ranks(self, x_BTD, choice, positions_BTk)
            stats |= usage.sums(ranks, moe.num_experts, real_BT, domains_BT, domains)
        if self.has_biases:
            gates_BTE = _dense_gates(choice, x_BTD.shape[1], moe.num_experts)
            y = y + jnp.einsum("BTE,ED->BTD", gates_BTE, self.down_bias[...]).astype(y.dtype)
        if moe.shared_experts:
            y = y + self._shared(x_BTD)
            if moe.combination is Combination.AVERAGE:
                y = y * 0.5
        if moe.output_norm is OutputNorm.LAYER:
            y = self.output_norm(y)
        return constrain(y, ("batch", "act_time", "act_embed")), stats

    @property
    def _correction(self) -> jax.Array | None:
        return self.correction[...] if hasattr(self, "correction") else None

    def router_inputs(self, x_BTD: jax.Array) -> jax.Array:
        """What the router reads, [B, T, D] in float32."""
        return x_BTD.astype(jnp.float32)

    def _shared(self, x_BTD: jax.Array) -> jax.Array:
        dense = lambda item, x: layers.dense(  # noqa: E731
            x, getattr(self, item.name)[...], adapter=layers.adapter_of(self, item.name)
        )
        h = constrain(dense(projections.SHARED_UP, x_BTD), ("batch", "act_time", "act_mlp"))
        if self.config.activation.gated:
            gate = constrain(dense(projections.SHARED_GATE, x_BTD), ("batch", "act_time", "act_mlp"))
            h = self.config.gating.gate(gate, h)
        else:
            h = self.config.activation(h)
        y = dense(projections.SHARED_DOWN, h)
        if self.moe.shared_gate is SharedGate.NONE:
            return y
        return y * jax.nn.sigmoid(layers.dense(x_BTD, self.shared_switch[...]))

    def weighted_sum(
        self, x_BTD: jax.Array, choice: Choice | ExpertChoice, positions_BTk: jax.Array | None
    ) -> jax.Array:
        """The experts' weighted outputs [B, T, D], on the active mesh where there is one."""
        names = [
            name for name in (*(item.name for item in projections.EXPERTS), *_HIDDEN_BIASES) if hasattr(self, name)
        ]
        # Cast here, so that what is gathered from other devices is in the compute dtype.
        weights: dict[str, Weight | Transposed | Factors] = {
            name: in_compute_dtype(getattr(self, name)[...], x_BTD.dtype) for name in names
        }
        for name in names:
            if (adapter := layers.adapter_of(self, name)) is not None:
                assert isinstance(adapter, Adapter), "experts have no others"
                weights[f"{name}_lora"] = adapter.of_experts(getattr(self, name)[...], x_BTD.dtype)
        if isinstance(choice, Choice) and positions_BTk is not None:
            of_routing: _Routed = (choice.experts, positions_BTk, choice.gates)
        else:
            of_routing = tuple(choice)
        run = functools.partial(self._on_device, isinstance(choice, ExpertChoice), x_BTD.shape[1])
        dropped = any(weight.seeds is not None for weight in weights.values() if isinstance(weight, Factors))
        numbers = jnp.arange(x_BTD.shape[0] * x_BTD.shape[1], dtype=jnp.int32).reshape(*x_BTD.shape[:2], 1)
        tokens_BT1 = numbers if dropped else None
        current = sharding.active()
        if current is None:
            return run(dispatch.Axes(), x_BTD, of_routing, weights, tokens_BT1)
        mesh, rules = current
        axes = _axes(mesh, rules, *x_BTD.shape[:2])
        # A decode step reads its weights once, and is not to copy them.
        in_groups = isinstance(choice, Choice) and positions_BTk is None and x_BTD.shape[1] > 1
        gathered = any(mesh.shape[axis] > 1 for axis in rules.expert_embed) and not axes.hidden
        if in_groups and gathered and lays_out_gathered():
            weights = dispatch.for_gathering(weights)
        tokens = P(axes.batch or None, axes.time or None)
        placed_weights, specs = _placed(weights, mesh, axes)
        of_choice = P(axes.batch or None) if isinstance(choice, ExpertChoice) else tokens
        return jax.shard_map(
            functools.partial(run, axes),
            mesh=mesh,
            in_specs=(tokens, of_choice, specs, tokens),
            out_specs=tokens,
            # All axes, even unsharded ones: the compiler does not partition kernels. A stage axis is added by vmap
            # (pipeline.run).
            axis_names=set(mesh.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes),
            check_vma=False,
        )(x_BTD, of_routing, placed_weights, tokens_BT1)

    def _on_device(
        self, by_experts: bool, length: int, axes: dispatch.Axes,
        x_BTD: jax.Array, of_routing: _Routed, weights: dispatch.Weights, tokens_BT1: jax.Array | None,
    ) -> jax.Array:  # fmt: skip
        moe, activation = self.moe, self.config.gating
        if by_experts:
            tokens_BEC, gates_BEC = of_routing
            y = dispatch.by_expert_choice(x_BTD, tokens_BEC, gates_BEC, weights, activation, axes, tokens_BT1)
        elif moe.has_capacity:
            experts, positions, gates = of_routing
            capacity = moe.capacity(length)
            y = dispatch.with_capacity(
                x_BTD, experts, positions, gates, weights, activation, capacity, axes, tokens_BT1
            )
        else:
            x_ND, experts, gates, tokens_N1 = jax.tree.map(
                lambda a: a.reshape(-1, a.shape[-1]), (x_BTD, *of_routing, tokens_BT1)
            )
            if moe.weighted is Weighted.INPUTS:  # every choice is a token with one expert
                (N, D), k = x_ND.shape, experts.shape[1]
                x_ND = (x_ND[:, None] * gates[..., None].astype(x_ND.dtype)).reshape(N * k, D)
                experts, gates = experts.reshape(N * k, 1), jnp.ones((N * k, 1), gates.dtype)
                tokens_N1 = None if tokens_N1 is None else jnp.repeat(tokens_N1, k, axis=0)
            y_ND = dispatch.dropless(x_ND, experts, gates, weights, activation, axes, tokens_N1)
            y = jnp.sum(y_ND.reshape(*x_BTD.shape[:2], -1, x_BTD.shape[2]), axis=2)
        return sharding.psum(y, axes.partial) if axes.partial else y


def _of_table(mlp: MoeMLP, tokens_BT: jax.Array | None) -> jax.Array | None:
    """The tokens' experts [B, T, k] by their ids; None: no table chooses."""
    if not hasattr(mlp, "expert_table"):
        return None
    assert tokens_BT is not None, "the decoder gives them"
    return jax.lax.stop_gradient(mlp.expert_table[...])[tokens_BT].astype(jnp.int32)


def _evenly(num_experts: int) -> layers.Initializer:
    """A table [V, k] that spreads token ids over the experts."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        first = jax.random.randint(key, (shape[0], 1), 0, num_experts)
        return ((first + jnp.arange(shape[1])) % num_experts).astype(dtype)

    return init


def _within_capacity(
    choice: Choice, moe: Moe, row_positions_T: jax.Array | None
) -> tuple[Choice, jax.Array, jax.Array]:
    """The choice without tokens that come too late to their experts, the tokens' places there, and how many came too late."""
    positions_BTk = router.positions_in_experts(choice.experts, moe.num_experts, row_positions_T)
    late = (positions_BTk >= moe.capacity(choice.experts.shape[1])) & (choice.experts < moe.num_experts)
    gates = jnp.where(late, 0.0, choice.gates)
    return choice._replace(gates=gates), positions_BTk, jnp.sum(late.astype(jnp.float32))


def _ranks(
    mlp: MoeMLP, x_BTD: jax.Array, choice: Choice | ExpertChoice, positions_BTk: jax.Array | None
) -> list[usage.Rank]:
    """What each token's experts give, one rank at a time."""
    assert isinstance(choice, Choice), "it is checked before a model is measured"
    result, weighs = [], mlp.moe.weighted is Weighted.OUTPUTS
    for rank in range(mlp.moe.top_k):
        at = slice(rank, rank + 1)
        gates_BT1 = choice.gates[..., at]
        ones_BT1 = jnp.ones_like(gates_BT1)
        single = Choice(choice.experts[..., at], ones_BT1 if weighs else gates_BT1)
        y_BTD = mlp.weighted_sum(x_BTD, single, None if positions_BTk is None else positions_BTk[..., at])
        if mlp.has_biases:
            gates_BTE = _dense_gates(single, x_BTD.shape[1], mlp.moe.num_experts)
            y_BTD = y_BTD + jnp.einsum("BTE,ED->BTD", gates_BTE, mlp.down_bias[...]).astype(y_BTD.dtype)
        # Gates of inputs are in the outputs already.
        result.append(usage.Rank(single.experts[..., 0], (gates_BT1 if weighs else ones_BT1)[..., 0], y_BTD))
    return result


def _placed(
    weights: dispatch.Weights, mesh: sharding.ActiveMesh, axes: dispatch.Axes
) -> tuple[dispatch.Weights, Mapping[str, P | Weight | Factors]]:
    """The experts' weights for shard_map, and their partition specs."""
    experts, hidden = axes.experts or None, axes.hidden or None
    shards = int(np.prod([mesh.shape[axis] for axis in axes.hidden]))
    of_weights: dict[str, Weight | Transposed | Factors] = {}
    specs: dict[str, P | Weight | Factors] = {}
    for name, weight in weights.items():
        down = name.startswith("down")
        if isinstance(weight, Factors):
            of_weights[name], specs[name] = weight, weight.specs(experts, hidden, hidden_inputs=down)
            continue
        if isinstance(weight, Transposed):
            of_weights[name], specs[name] = weight, P(experts, None, hidden)
            continue
        spec = P(experts, hidden) if down or name.endswith("_bias") else P(experts, None, hidden)
        of_weights[name], specs[name] = placed(weight, spec, axes.hidden, shards, hidden_inputs=down)
    return of_weights, specs


def _axes(mesh: sharding.ActiveMesh, rules: sharding.Rules, rows: int, length: int) -> dispatch.Axes:
    """The axes with more than one device; for tokens the leading axes that divide them, as in `constrain`."""

    def used(names: tuple[str, ...], size: int | None = None) -> tuple[str, ...]:
        retained: list[str] = []
        for name in names:
            if size is not None and size % int(np.prod([mesh.shape[a] for a in (*retained, name)])):
                break
            retained.append(name)
        return tuple(name for name in retained if mesh.shape[name] > 1)

    return dispatch.Axes(
        batch=used(rules.batch, rows),
        time=used(rules.act_time, length),
        experts=used(rules.experts),
        hidden=used(rules.mlp),
    )


def _dense_gates(choice: Choice | ExpertChoice, length: int, num_experts: int) -> jax.Array:
    """The weight of every expert for every token, [B, T, E]."""
    if isinstance(choice, Choice):
        chosen_BTkE = choice.experts[..., None] == jnp.arange(num_experts, dtype=jnp.int32)
        return jnp.sum(jnp.where(chosen_BTkE, choice.gates[..., None], 0.0), axis=2)
    B, E, _ = choice.tokens.shape
    rows, experts = jnp.arange(B)[:, None, None], jnp.arange(E)[:, None]
    return jnp.zeros((B, length, E), jnp.float32).at[rows, choice.tokens, experts].set(choice.gates, mode="drop")


def router_loss(stats: Stats, moe: Moe) -> jax.Array:
    """The router's losses times their coefficients, summed over layers; part of the loss sum.

    Args:
      stats: from `choose`, of one layer or with a leading axis of layers.
      moe: the configuration.
    """
    loss = moe.balance_loss * jnp.sum(stats["balance"]) + moe.router_z_loss * jnp.sum(stats["z"])
    if "hint" not in stats:
        return loss
    assert moe.hints is not None, "there is a hint"
    return loss + moe.hints.loss * jnp.sum(stats["hint"])


def router_metrics(stats: Stats, moe: Moe) -> dict[str, jax.Array]:
    """Metrics of how the experts are used.

    Args:
      stats: sums of `choose` over the whole batch, of one layer or with a leading axis of layers.
      moe: the configuration.

    Returns:
      balance_loss, router_z_loss: their contributions to the loss per token, summed over layers.
      router_entropy: mean over tokens and layers, relative to a uniform router: 1 if it prefers no expert.
      dropped_share: share of choices beyond an expert's capacity; with expert choice, share of tokens that no expert
        chose.
      expert_load_max, expert_load_min: load of the busiest and the idlest expert of all layers, relative to the mean.
      expert_load/<expert>: mean over layers.
      With domains also hint_accuracy: the share of tokens of a known domain whose most probable expert belongs to it;
      hint_accuracy/<domain>: the same of one domain, NaN without its tokens. With a hint also hint_loss and hint_weight.
    """
    tokens_L = jnp.maximum(jnp.atleast_1d(stats["tokens"]), 1.0)
    load_LE = stats["load"].reshape(len(tokens_L), moe.num_experts)
    share_LE = load_LE * moe.num_experts / jnp.maximum(jnp.sum(load_LE, axis=-1, keepdims=True), 1.0)
    total = jnp.sum(tokens_L)
    choices = total if moe.routing is Routing.EXPERT_CHOICE else jnp.maximum(jnp.sum(load_LE), 1.0)
    metrics = {
        "balance_loss": moe.balance_loss * jnp.sum(stats["balance"] / tokens_L),
        "router_z_loss": moe.router_z_loss * jnp.sum(stats["z"] / tokens_L),
        "router_entropy": jnp.sum(stats["entropy"]) / total / math.log(max(moe.num_experts, 2)),
        "dropped_share": jnp.sum(stats["dropped"]) / choices,
        "expert_load_max": jnp.max(share_LE),
        "expert_load_min": jnp.min(share_LE),
    }
    metrics |= {f"expert_load/{expert}": share for expert, share in enumerate(jnp.mean(share_LE, axis=0))}
    if "hint" in stats:
        assert moe.hints is not None, "there is a hint"
        metrics["hint_loss"] = moe.hints.loss * jnp.sum(stats["hint"] / tokens_L)
        metrics["hint_weight"] = jnp.sum(stats["hint_weight"]) / total
    if "domain_load" in stats:
        assert moe.hints is not None, "there are domains"
        metrics |= _domain_metrics(stats["domain_load"], moe.hints, moe.num_experts)
    return metrics


def _domain_metrics(load: jax.Array, hints: Hints, num_experts: int) -> dict[str, jax.Array]:
    load_dE = jnp.sum(load.reshape(-1, 1 + len(hints.domains), num_experts), axis=0)[1:]
    masks = [np.isin(np.arange(num_experts), experts) for experts in hints.assignment(num_experts)]
    hits_d = jnp.sum(load_dE * jnp.asarray(masks, jnp.float32), axis=-1)
    tokens_d = jnp.sum(load_dE, axis=-1)
    metrics = {"hint_accuracy": jnp.sum(hits_d) / jnp.maximum(jnp.sum(tokens_d), 1.0)}
    for domain, hits, tokens in zip(hints.domains, hits_d, tokens_d):
        metrics[f"hint_accuracy/{domain}"] = jnp.where(tokens > 0, hits / jnp.maximum(tokens, 1.0), jnp.nan)
    return metrics
