"""The router: scores, choice of experts, domain hints, and statistics of the choice.

Shape letters: E experts, k experts per token, C tokens per expert (its capacity).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from capibara.config import configurable
from capibara.core.types import UserError

Stats = dict[str, jax.Array]
_NEVER = -1e30  # log probability of an excluded choice; finite, so that differences are numbers
_LEAST = -20.0  # below it, the logarithm of softplus is the logit in float32


class Dispatch(enum.StrEnum):
    """Whether experts process all their tokens (dropless: MegaBlocks, Gale et al. 2022) or at most their capacity."""

    DROPLESS = "dropless"
    CAPACITY = "capacity"


class Routing(enum.StrEnum):
    """Whether tokens choose their top_k experts, or experts choose their tokens (Zhou et al. 2022, arXiv:2202.09368).

    Expert choice compares a token with later ones of its row, so it is not causal: a decoder trained with it cannot
    reproduce it in generation. It suits encoders.
    """

    TOKEN_CHOICE = "token_choice"
    EXPERT_CHOICE = "expert_choice"


class Score(enum.StrEnum):
    """How logits become scores: softmax over all experts, or for each a sigmoid (DeepSeek-V3) or a root of softplus (V4)."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrt_softplus"

    def logs(self, logits: jax.Array) -> jax.Array:
        """The logarithms of the scores."""
        match self:
            case Score.SOFTMAX:
                return jax.nn.log_softmax(logits, axis=-1)
            case Score.SIGMOID:
                return jax.nn.log_sigmoid(logits)
        # softplus underflows where it is the exponential itself.
        within = jnp.log(jax.nn.softplus(jnp.maximum(logits, _LEAST)))
        return 0.5 * jnp.where(logits < _LEAST, logits, within)


class Gates(enum.StrEnum):
    """Weights of a token's experts: their scores, or scores normalised to sum to 1 (Mixtral, Qwen3-MoE).

    Normalised softmax scores equal a softmax over the chosen logits only. close: an expert's softmax among those whose
    logits are close to its own and that were not chosen before it (SparseMixer, arXiv:2409.12136; Phi-3.5-MoE).
    """

    SCORES = "scores"
    NORMALIZED = "normalized"
    CLOSE = "close"


class Correction(enum.StrEnum):
    """Whether a bias of each expert decides the choice, and not the weights (Wang et al. 2024, arXiv:2408.15664).

    expert: of its score (DeepSeek-V3, GLM 4.5). logit: of its logit (Kolibri). It has no gradient.
    """

    NONE = "none"
    EXPERT = "expert"
    LOGIT = "logit"


class GroupScore(enum.StrEnum):
    """By what groups of experts are chosen: the sum of their two best scores (DeepSeek-V3), or the best (DeepSeek-V2)."""

    PAIR = "pair"
    BEST = "best"


class Outside(enum.StrEnum):
    """Whether experts outside of a token's groups are never chosen, or as if their scores were 0 (A.X-K2)."""

    NEVER = "never"
    ZERO = "zero"


class Weighted(enum.StrEnum):
    """Whether a token's weights multiply the outputs of its experts, or their inputs (Llama 4)."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"


class SharedGate(enum.StrEnum):
    """Whether the shared experts' output has a factor for each token: none, or the sigmoid of a projection (Qwen2-MoE)."""

    NONE = "none"
    SIGMOID = "sigmoid"


class Combination(enum.StrEnum):
    """What the chosen and the shared experts give together: the sum of both, or its half (Command A's mixtures)."""

    SUM = "sum"
    AVERAGE = "average"


class OutputNorm(enum.StrEnum):
    """Whether what the experts give together is normalised, as the layers are (A.X-K1)."""

    NONE = "none"
    LAYER = "layer"


class MoeBias(enum.StrEnum):
    """Which parts of a mixture have biases.

    mlp: the experts' up and down projections, if TransformerConfig.bias includes the MLP; all: the router and every
    projection of the experts (gpt-oss).
    """

    MLP = "mlp"
    ALL = "all"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hints:
    """Domain hints of the hybrid router: tokens of a known domain first go to its experts, later the router decides.

    Attributes:
      domains: names of the domains, in the numbering of the batch's `domains` (1 is the first; 0: no hint).
      experts: the experts of each domain; None: all experts are distributed evenly.
      start: weight of the hints at the first step; 0: no hint, the domains are only measured.
      hold_steps: number of steps at that weight.
      decay_steps: number of steps over which it then decays linearly to 0.
      loss: coefficient of the cross entropy between router and hint, scaled by the weight. It teaches the router the
        domains while the hints still decide.
    """

    domains: tuple[str, ...]
    experts: tuple[tuple[int, ...], ...] | None = None
    start: float = 1.0
    hold_steps: int = 0
    decay_steps: int
    loss: float = 0.01

    def __post_init__(self) -> None:
        if not self.domains:
            raise UserError("Hints.domains is empty, must name at least one domain, or leave Moe.hints None")
        if self.experts is not None and len(self.experts) != len(self.domains):
            raise UserError(
                f"Hints.experts has {len(self.experts)} entries, must have one for each of the {len(self.domains)} "
                "domains, or be None to spread the experts evenly"
            )
        if not 0 <= self.start <= 1:
            raise UserError(f"Hints.start is {self.start}, must be at least 0 and at most 1: try 1.0")
        if self.hold_steps < 0:
            raise UserError(f"Hints.hold_steps is {self.hold_steps}, must be at least 0")
        if self.decay_steps < 1:
            raise UserError(f"Hints.decay_steps is {self.decay_steps}, must be at least 1")
        if not 0 <= self.loss < math.inf:
            raise UserError(f"Hints.loss is {self.loss}, must be finite and at least 0: try 0.01")

    def weight(self, step: jax.Array) -> jax.Array:
        """The hints' weight at a train step: float32, from `start` to 0."""
        decayed = (jnp.asarray(step, jnp.float32) - float(self.hold_steps)) / float(self.decay_steps)
        return self.start * (1.0 - jnp.clip(decayed, 0.0, 1.0))

    def assignment(self, num_experts: int) -> tuple[tuple[int, ...], ...]:
        """The experts of each domain."""
        if self.experts is not None:
            return self.experts
        if num_experts < len(self.domains):
            return tuple((index % num_experts,) for index in range(len(self.domains)))
        return tuple(tuple(part.tolist()) for part in np.array_split(np.arange(num_experts), len(self.domains)))


class MlpKind(enum.StrEnum):
    """Whether a layer has experts, or an MLP of the model's mlp_dim where other layers have experts."""

    EXPERTS = "experts"
    DENSE = "dense"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Moe:
    """A mixture of experts in place of an MLP, in all layers or in some.

    Attributes:
      num_experts: experts of a layer.
      top_k: experts per token; with expert choice their mean.
      expert_dim: hidden width of an expert; None: the model's mlp_dim.
      first_dense: number of the first layers that have an MLP of the model's mlp_dim, and no experts (DeepSeek-V3: 3).
      pattern: what the layers have, from the first one of the model, repeated over all; ("dense", "experts") alternates
        (Jamba, Llama 4).
      hash_layers: number of the first layers in which a table has the experts of each token id (DeepSeek-V4: 3).
      shared_experts: experts that process every token (DeepSeekMoE, Dai et al. 2024, arXiv:2401.06066).
      shared_dim: hidden width of a shared expert; None: as the other experts.
      dispatch: dropless, or up to a capacity.
      capacity_factor: an expert's capacity in a row of T tokens is ceil(T * top_k * capacity_factor / num_experts);
        used with dispatch "capacity" and expert choice.
      routing: whether tokens or experts choose.
      logit_cap: the router's logits become cap * tanh(logits / cap) (Laguna); None: no cap.
      score, gates: how the weights of a token's experts are computed.
      closeness: for gates "close": the largest distance of close logits, relative to the logit or to the chosen one.
      weighted: whether gates multiply the experts' outputs or inputs.
      gate_offset: added to the sum of scores that normalised gates are divided by (LFM2: 1e-6).
      correction: whether a bias decides the choice.
      groups, top_groups, group_score: experts are in `groups` groups of equal size, and a token chooses among those of
        the `top_groups` with the highest scores; 1 group: among all.
      outside: what the others count for.
      scale: factor of all gates.
      shared_gate: factor of the shared experts' output.
      combination: how the outputs of chosen and shared experts are put together.
      output_norm: whether the result is normalised.
      bias: which projections have a bias.
      balance_loss: coefficient of the load-balance loss, which is 1 per token and layer if experts are used evenly.
      router_z_loss: coefficient of the router's squared log normaliser (ST-MoE, Zoph et al. 2022).
      hints: domain hints; None: no hints.
    """

    num_experts: int
    top_k: int = 2
    expert_dim: int | None = None
    first_dense: int = 0
    pattern: tuple[MlpKind, ...] = (MlpKind.EXPERTS,)
    hash_layers: int = 0
    shared_experts: int = 0
    shared_dim: int | None = None
    dispatch: Dispatch = Dispatch.DROPLESS
    capacity_factor: float = 1.25
    routing: Routing = Routing.TOKEN_CHOICE
    logit_cap: float | None = None
    score: Score = Score.SOFTMAX
    gates: Gates = Gates.NORMALIZED
    closeness: float = 0.02
    weighted: Weighted = Weighted.OUTPUTS
    gate_offset: float = 0.0
    correction: Correction = Correction.NONE
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = GroupScore.PAIR
    outside: Outside = Outside.NEVER
    scale: float = 1.0
    shared_gate: SharedGate = SharedGate.NONE
    combination: Combination = Combination.SUM
    output_norm: OutputNorm = OutputNorm.NONE
    bias: MoeBias = MoeBias.MLP
    balance_loss: float = 0.01
    router_z_loss: float = 0.0
    hints: Hints | None = None

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "expert_dim", "shared_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"Moe.{name} is {value}, must be at least 1")
        if self.top_k > self.num_experts:
            most = self.num_experts
            raise UserError(f"Moe.top_k ({self.top_k}) must be at most num_experts ({most}): try {min(2, most)}")
        for name in ("shared_experts", "first_dense", "hash_layers"):
            if getattr(self, name) < 0:
                raise UserError(f"Moe.{name} is {getattr(self, name)}, must be at least 0")
        if MlpKind.EXPERTS not in self.pattern:
            raise UserError(f"Moe.pattern is {tuple(map(str, self.pattern))}, must have 'experts': try ('experts',)")
        if not 0 < self.capacity_factor < math.inf:
            raise UserError(f"Moe.capacity_factor is {self.capacity_factor}, must be finite and above 0: try 1.25")
        for name, usual in (("balance_loss", 0.01), ("router_z_loss", 0.001)):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"Moe.{name} is {getattr(self, name)}, must be finite and at least 0: try {usual}")
        self._check_choice()
        if self.hints is not None:
            for domain, experts in zip(self.hints.domains, self.hints.assignment(self.num_experts)):
                if not experts or not all(0 <= e < self.num_experts for e in experts):
                    raise UserError(
                        f"Hints.experts of the domain {domain!r} are {experts}, must be at least one of 0 to "
                        f"{self.num_experts - 1} (Moe.num_experts is {self.num_experts})"
                    )

    def _check_choice(self) -> None:
        if self.logit_cap is not None and not 0 < self.logit_cap < math.inf:
            raise UserError(f"Moe.logit_cap is {self.logit_cap}, must be finite and above 0, or None: no cap")
        if not 0 < self.scale < math.inf:
            raise UserError(f"Moe.scale is {self.scale}, must be finite and above 0: try 1.0")
        if not 0 <= self.gate_offset < math.inf or (self.gate_offset and self.gates is not Gates.NORMALIZED):
            raise UserError(
                f"Moe.gate_offset is {self.gate_offset}, must be finite and at least 0, and is for normalised gates: try 0.0"
            )
        if self.groups < 1 or self.num_experts % self.groups:
            raise UserError(
                f"Moe.groups ({self.groups}) must divide num_experts ({self.num_experts}) and be at least 1: try 1"
            )
        if not 1 <= self.top_groups <= self.groups:
            raise UserError(f"Moe.top_groups ({self.top_groups}) must be from 1 to groups ({self.groups}): try 1")
        if self.groups > 1 and self.num_experts // self.groups < 2:
            raise UserError(
                f"Moe.groups ({self.groups}) of num_experts ({self.num_experts}) have one expert each, must have two or more: "
                f"try {self.num_experts // 2}"
            )
        if self.top_k > self.num_experts // self.groups * self.top_groups:
            raise UserError(
                f"Moe.top_k ({self.top_k}) must be at most the experts of top_groups ({self.top_groups}): "
                f"{self.num_experts // self.groups * self.top_groups}"
            )
        if self.routing is Routing.EXPERT_CHOICE and (self.correction is not Correction.NONE or self.groups > 1):
            raise UserError(
                "Moe.correction and groups decide which experts a token chooses, routing is 'expert_choice': leave them out"
            )
        if self.correction is Correction.LOGIT and self.score is Score.SQRT_SOFTPLUS:
            raise UserError("Moe.correction is 'logit', must be 'expert' or 'none' with score 'sqrt_softplus'")
        if self.correction is Correction.LOGIT and (self.groups > 1 or self.hints is not None):
            raise UserError("Moe.correction is 'logit', must be 'expert' or 'none' with groups above 1 and with hints")
        if not 0 <= self.closeness < math.inf:
            raise UserError(f"Moe.closeness is {self.closeness}, must be finite and at least 0: try 0.02")
        if self.gates is not Gates.CLOSE and self.closeness != 0.02:
            raise UserError(
                f"Moe.closeness ({self.closeness}) is for gates 'close', not for {str(self.gates)!r}: leave it out"
            )
        if self.gates is Gates.CLOSE and not (self._chooses_by_softmax and self.hints is None):
            raise UserError(
                "Moe.gates ('close') compare the logits of tokens that choose by softmax alone: leave routing, score, "
                "correction, groups and hints out"
            )
        if self.weighted is Weighted.INPUTS and (self.has_capacity or self.bias is MoeBias.ALL):
            raise UserError(
                "Moe.weighted is 'inputs', must have dispatch 'dropless', routing 'token_choice' and bias 'mlp': leave them out, "
                "or write 'outputs'"
            )
        if self.hash_layers:
            self._check_table()
        if self.shared_gate is not SharedGate.NONE and not self.shared_experts:
            raise UserError("Moe.shared_gate is for shared experts, shared_experts is 0: leave it out")
        if self.combination is not Combination.SUM and not self.shared_experts:
            raise UserError("Moe.combination is for shared experts, shared_experts is 0: leave it out")

    def _check_table(self) -> None:
        unsupported = {
            "first_dense is above 0": self.first_dense > 0,
            "pattern has 'dense'": MlpKind.DENSE in self.pattern,
            "routing is 'expert_choice'": self.routing is Routing.EXPERT_CHOICE,
            "gates is 'close'": self.gates is Gates.CLOSE,
            "hints are set": self.hints is not None,
        }
        for option, is_set in unsupported.items():
            if is_set:
                raise UserError(f"Moe.hash_layers ({self.hash_layers}) is not supported where {option}: leave it out")

    def in_layer(self, layer: int) -> bool:
        """Whether the layer with this number has experts."""
        return layer >= self.first_dense and self.pattern[layer % len(self.pattern)] is MlpKind.EXPERTS

    def module(self, layer: int) -> str:
        """The module of a layer that has its experts or MLP."""
        if layer < self.hash_layers:
            return "hash_mlp"
        return "mlp" if self.in_layer(layer) else "first_mlp"

    @property
    def _chooses_by_softmax(self) -> bool:
        """Whether tokens choose the experts with the highest logits."""
        plain = self.correction is Correction.NONE and self.groups == 1 and self.score is Score.SOFTMAX
        return plain and self.routing is Routing.TOKEN_CHOICE

    @property
    def has_capacity(self) -> bool:
        """Whether an expert processes a limited number of tokens per row."""
        return self.dispatch is Dispatch.CAPACITY or self.routing is Routing.EXPERT_CHOICE

    def capacity(self, length: int) -> int:
        """The most tokens of a row of `length` that an expert processes."""
        return min(length, math.ceil(length * self.top_k * self.capacity_factor / self.num_experts))


class Hint(NamedTuple):
    """Domain hints of a batch at a step.

    Attributes:
      experts: [B, T, E] bool: the experts of the token's domain; all experts if the domain is unknown.
      known: [B, T] float32: 1 where the domain is known.
      weight: float32 scalar.
    """

    experts: jax.Array
    known: jax.Array
    weight: jax.Array


class Remix(NamedTuple):
    """Scores that are mixed into those of one token of each row: pathways of other prompts (C3PO, Li et al. 2025).

    Attributes:
      at: [B, T] bool, true at that token.
      scores: [B, E] float32.
      weight: [B] float32, from 0 (the token's own scores) to 1 (these alone).
    """

    at: jax.Array
    scores: jax.Array
    weight: jax.Array


class Choice(NamedTuple):
    """The experts that tokens chose.

    Attributes:
      experts: [B, T, k] int32; num_experts for no expert (padding, or choices that a hint of weight 1 excludes).
      gates: [B, T, k] float32.
    """

    experts: jax.Array
    gates: jax.Array


class ExpertChoice(NamedTuple):
    """The tokens that experts chose.

    Attributes:
      tokens: [B, E, C] int32 positions in the row; T for no token.
      gates: [B, E, C] float32.
    """

    tokens: jax.Array
    gates: jax.Array


def hint_of(moe: Moe, domains_BT: jax.Array | None, step: jax.Array | None) -> Hint | None:
    """The hint of a batch; None without hints, and in evaluation (no step)."""
    if moe.hints is None or domains_BT is None or step is None:
        return None
    table = np.ones((len(moe.hints.domains) + 1, moe.num_experts), bool)  # row 0: unknown domain
    for row, experts in zip(table[1:], moe.hints.assignment(moe.num_experts)):
        row[:] = np.isin(np.arange(moe.num_experts), experts)
    domains_BT = jnp.where(domains_BT < len(table), domains_BT, 0)
    return Hint(jnp.asarray(table)[domains_BT], (domains_BT > 0).astype(jnp.float32), moe.hints.weight(step))


def choose(
    logits_BTE: jax.Array,
    real_BT: jax.Array,
    moe: Moe,
    hint: Hint | None = None,
    correction_E: jax.Array | None = None,
    remix: Remix | None = None,
    of_table_BTk: jax.Array | None = None,
) -> tuple[Choice | ExpertChoice, Stats]:
    """Routes the tokens.

    Args:
      logits_BTE: the router's logits, float32.
      real_BT: bool; padding is neither routed nor counted.
      moe: the configuration.
      hint: the tokens' domain hints.
      correction_E: bias of each expert's score, or logit, in the choice.
      remix: scores that are mixed in.
      of_table_BTk: the tokens' experts, whatever their scores; None: the scores decide.

    Returns:
      The choice, and float32 sums over real tokens, which can be added over rows:
        tokens: number of tokens.
        balance: load-balance loss (Shazeer et al. 2017; Fedus et al. 2021, eq. 4), computed within each row and
          weighted by its tokens, so that it does not depend on how rows are divided over devices and micro-batches. 1
          per token if experts are used evenly; 0 with expert choice.
        z: squared log normaliser.
        entropy: of the router's probabilities, in nats.
        load: [E] tokens routed to each expert; fewer than top_k per token where a hint of weight 1 leaves fewer.
        dropped: choices beyond an expert's capacity (added by the caller); with expert choice, tokens that no expert
          chose.
      With a hint also: hint (its cross entropy times its weight) and hint_weight. With a remix also: pathway, [B, E] the
      scores of its tokens before it.
    """
    log_scores = log_p = moe.score.logs(logits_BTE)
    if moe.score is not Score.SOFTMAX:
        log_p = jax.nn.log_softmax(log_scores, axis=-1)
    p, real = jnp.exp(log_p), real_BT.astype(jnp.float32)
    stats = {
        "tokens": jnp.sum(real),
        "z": jnp.sum(jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)) * real),
        "entropy": -jnp.sum(p * log_p * real[..., None]),
    }
    if hint is not None:
        log_scores, of_hint = _hinted(log_scores, log_p, real, hint)
        stats.update(of_hint)
    if remix is not None:
        stats["pathway"] = jnp.einsum("BT,BTE->BE", remix.at.astype(jnp.float32), jnp.exp(log_scores))
        log_scores = _remixed(log_scores, remix)
    choice: Choice | ExpertChoice
    if moe.routing is Routing.EXPERT_CHOICE:
        choice, of_choice = _expert_choice(log_scores, real_BT, moe)
    else:
        if of_table_BTk is None:
            experts_BTk = _highest(_ranks(log_scores, moe, correction_E), real_BT, moe)
        else:
            experts_BTk = jnp.where(real_BT[..., None], of_table_BTk, moe.num_experts)
        choice, of_choice = _token_choice(logits_BTE, log_scores, p, real_BT, moe, experts_BTk)
    return choice, stats | of_choice


def _hinted(log_scores_BTE: jax.Array, log_p_BTE: jax.Array, real_BT: jax.Array, hint: Hint) -> tuple[jax.Array, Stats]:
    """The log scores with the hint mixed in, and the statistics of the hint."""
    # Probabilities are mixed, not logits: however confident the router is, weight 1 routes a token to its domain, and
    # weight 0.5 counts half. The hint is the router's own distribution restricted to the domain's experts rather than a
    # uniform one, since top-k would always break that tie in favour of the first ones.
    log_inside_BTE = jnp.where(hint.experts, log_p_BTE, _NEVER)
    log_share_BT1 = jax.nn.logsumexp(log_inside_BTE, axis=-1, keepdims=True)
    log_total_BT1 = jax.nn.logsumexp(log_scores_BTE, axis=-1, keepdims=True)  # 0 for softmax
    # In logarithms: if the router is confident of another domain, its probability for this one can underflow.
    mixed = log_total_BT1 + jnp.logaddexp(
        jnp.log1p(-hint.weight) + log_p_BTE, jnp.log(hint.weight) + log_inside_BTE - log_share_BT1
    )
    return mixed, {
        # -sum(of_hint * log(p)) minus the entropy of the hint: -log of the total probability of the domain's experts.
        "hint": -hint.weight * jnp.sum(log_share_BT1[..., 0] * hint.known * real_BT),
        "hint_weight": hint.weight * jnp.sum(real_BT),
    }


def _remixed(log_scores_BTE: jax.Array, remix: Remix) -> jax.Array:
    """The log scores with those of other prompts mixed in."""
    weight_B11 = remix.weight[:, None, None]
    mixed_BTE = (1.0 - weight_B11) * jnp.exp(log_scores_BTE) + weight_B11 * remix.scores[:, None]
    changed_BT1 = (remix.at & (remix.weight[:, None] > 0))[..., None]
    return jnp.where(changed_BT1, jnp.log(jnp.maximum(mixed_BTE, 1e-30)), log_scores_BTE)


def domain_load(logits_BTE: jax.Array, real_BT: jax.Array, domains_BT: jax.Array, hints: Hints) -> jax.Array:
    """For each domain, the tokens whose most probable expert each is, whatever a hint says; padding is not counted.

    Args:
      logits_BTE: the router's logits.
      real_BT: bool.
      domains_BT: int32 domain of each token, counted from 1; 0: unknown.
      hints: the domains.

    Returns:
      [1 + number of domains, E] float32; row 0 has the tokens of unknown domains. Sums can be added over rows.
    """
    domains_BT = jnp.where(domains_BT <= len(hints.domains), domains_BT, 0)
    of_domain = (domains_BT[..., None] == jnp.arange(1 + len(hints.domains))) & real_BT[..., None]
    best = jnp.argmax(logits_BTE, axis=-1)[..., None] == jnp.arange(logits_BTE.shape[-1])
    return jnp.einsum("BTd,BTE->dE", of_domain.astype(jnp.float32), best.astype(jnp.float32))


def _ranks(log_scores_BTE: jax.Array, moe: Moe, correction_E: jax.Array | None) -> jax.Array:
    """What a token's experts are chosen by, [B, T, E]: the highest."""
    if correction_E is None and moe.groups == 1:
        return log_scores_BTE
    if moe.correction is Correction.LOGIT and correction_E is not None:
        # Back from scores, which may be mixed with others; a softmax's are logits up to a constant.
        softmax = moe.score is Score.SOFTMAX
        return log_scores_BTE - (0.0 if softmax else jnp.log(-jnp.expm1(log_scores_BTE))) + correction_E
    ranks_BTE = jnp.exp(log_scores_BTE) + (0.0 if correction_E is None else correction_E)
    ranks_BTE = jnp.where(log_scores_BTE < _NEVER / 2, -jnp.inf, ranks_BTE)
    if moe.groups == 1:
        return ranks_BTE
    in_groups = ranks_BTE.reshape(*ranks_BTE.shape[:2], moe.groups, -1)
    left = jnp.max(in_groups, axis=-1)
    if moe.group_score is GroupScore.PAIR:
        first = jnp.argmax(in_groups, axis=-1)[..., None] == jnp.arange(in_groups.shape[-1])
        left = left + jnp.max(jnp.where(first, -jnp.inf, in_groups), axis=-1)
    chosen = jnp.zeros(left.shape, bool)
    for _ in range(moe.top_groups):
        item = jnp.argmax(left, axis=-1)[..., None] == jnp.arange(moe.groups)
        chosen, left = chosen | item, jnp.where(item, -jnp.inf, left)
    outside = jnp.where(in_groups == -jnp.inf, -jnp.inf, 0.0) if moe.outside is Outside.ZERO else -jnp.inf
    return jnp.where(chosen[..., None], in_groups, outside).reshape(ranks_BTE.shape)


def _close_shares(logits_BTE: jax.Array, chosen_BTkE: jax.Array, closeness: float) -> jax.Array:
    """The gates [B, T, k] of chosen experts among those with close logits that were not chosen before."""
    logits_BT1E, counted = logits_BTE[..., None, :], chosen_BTkE.astype(jnp.int32)
    before = jnp.cumsum(counted, axis=2) > counted
    best = jnp.max(jnp.where(before, -jnp.inf, logits_BT1E), axis=-1, keepdims=True)
    far = (best - logits_BT1E) / jnp.maximum(jnp.abs(logits_BT1E), best) > closeness
    shares = jax.nn.softmax(jnp.where(before | jax.lax.stop_gradient(far), -jnp.inf, logits_BT1E), axis=-1)
    return jnp.sum(jnp.where(chosen_BTkE, shares, 0.0), axis=-1)


def _highest(ranks_BTE: jax.Array, real_BT: jax.Array, moe: Moe) -> jax.Array:
    """The experts [B, T, k] with the highest ranks; num_experts where there is none."""
    rest, every = jax.lax.stop_gradient(ranks_BTE), jnp.arange(moe.num_experts, dtype=jnp.int32)
    experts, possible = [], []
    # Not lax.top_k: the partitioner would gather all tokens for that call.
    for _ in range(moe.top_k):
        best_BT = jnp.argmax(rest, axis=-1).astype(jnp.int32)
        experts.append(best_BT)
        # At hint weight 1, a domain with fewer experts than top_k leaves excluded choices. They would add nothing, but
        # use capacity that another token needs. (A NaN stays a choice, so that it is noticed.)
        possible.append(real_BT & ~(jnp.max(rest, axis=-1) < _NEVER / 2))
        rest = jnp.where(best_BT[..., None] == every, -jnp.inf, rest)
    return jnp.where(jnp.stack(possible, axis=-1), jnp.stack(experts, axis=-1), moe.num_experts)


def _token_choice(
    logits_BTE: jax.Array,
    log_scores_BTE: jax.Array,
    p_BTE: jax.Array,
    real_BT: jax.Array,
    moe: Moe,
    experts_BTk: jax.Array,
) -> tuple[Choice, Stats]:
    chosen_BTkE = experts_BTk[..., None] == jnp.arange(moe.num_experts, dtype=jnp.int32)
    if moe.gates is Gates.CLOSE:
        gates_BTk = _close_shares(logits_BTE, chosen_BTkE, moe.closeness)
    else:
        gates_BTk = jnp.sum(jnp.where(chosen_BTkE, jnp.exp(log_scores_BTE)[..., None, :], 0.0), axis=-1)
    if moe.gates is Gates.NORMALIZED:
        sum_BT1 = jnp.sum(gates_BTk, axis=-1, keepdims=True)
        gates_BTk = gates_BTk / (sum_BT1 + moe.gate_offset if moe.gate_offset else jnp.maximum(sum_BT1, 1e-20))
    if moe.scale != 1:
        gates_BTk = gates_BTk * moe.scale
    real = real_BT.astype(jnp.float32)
    load_BE = jnp.sum(chosen_BTkE.astype(jnp.float32), axis=(1, 2))
    p_BE = jnp.sum(p_BTE * real[..., None], axis=1)
    balance_B = jnp.sum(load_BE * p_BE, axis=-1) / jnp.maximum(jnp.sum(load_BE, axis=-1), 1.0)
    stats = {
        "balance": moe.num_experts * jnp.sum(balance_B),
        "load": jnp.sum(load_BE, axis=0),
        "dropped": jnp.zeros((), jnp.float32),
    }
    return Choice(experts_BTk, gates_BTk), stats


def _expert_choice(log_scores_BTE: jax.Array, real_BT: jax.Array, moe: Moe) -> tuple[ExpertChoice, Stats]:
    T = real_BT.shape[1]
    C = moe.capacity(T)
    scores_BET = jnp.swapaxes(jnp.where(real_BT[..., None], log_scores_BTE, -jnp.inf), 1, 2)
    order_BET = jnp.argsort(-jax.lax.stop_gradient(scores_BET), axis=-1, stable=True)
    tokens_BEC = order_BET[..., :C].astype(jnp.int32)
    scores_BEC = jnp.take_along_axis(scores_BET, tokens_BEC, axis=-1)
    taken = scores_BEC > _NEVER / 2  # neither padding nor excluded by a hint
    tokens_BEC, gates_BEC = jnp.where(taken, tokens_BEC, T), jnp.exp(scores_BEC)
    rows = jnp.arange(len(real_BT))[:, None, None]
    reached_BT = jnp.zeros(real_BT.shape, bool).at[rows, tokens_BEC].set(True, mode="drop")
    stats = {
        "balance": jnp.zeros((), jnp.float32),
        "load": jnp.sum(taken.astype(jnp.float32), axis=(0, 2)),
        "dropped": jnp.sum((real_BT & ~reached_BT).astype(jnp.float32)),
    }
    return ExpertChoice(tokens_BEC, gates_BEC), stats


def positions_in_experts(experts_BTk: jax.Array, num_experts: int, row_positions_T: jax.Array | None) -> jax.Array:
    """Position of each choice among its row's choices of the same expert: [B, T, k] int32.

    Choices are ordered by the tokens' row positions, then by rank: whether a token is dropped for lack of capacity
    depends only on earlier tokens.

    Args:
      experts_BTk: the chosen experts; num_experts: none.
      num_experts: number of experts.
      row_positions_T: column of each token in the row before sharding.balanced; None: in order.
    """
    B, T, k = experts_BTk.shape
    row_positions_T = jnp.arange(T, dtype=jnp.int32) if row_positions_T is None else row_positions_T.astype(jnp.int32)
    turn = jnp.broadcast_to(row_positions_T[:, None] * k + jnp.arange(k, dtype=jnp.int32), (B, T, k)).reshape(B, -1)
    index = jnp.broadcast_to(jnp.arange(T * k, dtype=jnp.int32), (B, T * k))
    experts, _, index = jax.lax.sort((experts_BTk.reshape(B, -1), turn, index), num_keys=2)
    of_expert = experts_BTk.reshape(B, -1, 1) == jnp.arange(num_experts + 1, dtype=jnp.int32)
    sizes = jnp.sum(of_expert.astype(jnp.int32), axis=1)
    first = jnp.take_along_axis(jnp.cumsum(sizes, axis=1) - sizes, experts, axis=1)
    position = jnp.arange(T * k, dtype=jnp.int32) - first
    return jax.lax.sort((index, position), num_keys=1)[1].reshape(B, T, k)
