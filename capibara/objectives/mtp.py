"""The auxiliary loss of multi-token prediction (DeepSeek-V3, 2024, arXiv:2412.19437, section 2.2)."""

from __future__ import annotations

import jax

from capibara.core.types import Batch, Params
from capibara.kernels.cross_entropy.dispatch import cross_entropy
from capibara.kernels.cross_entropy.terms import LossSums
from capibara.models.api import DecoderConfig, Model, Mtp, mtp
from capibara.sharding import RematPolicy

_TOKENS, _TARGETS, _WEIGHTS = ("mtp_tokens_{}", "mtp_targets_{}", "mtp_weights_{}")


def with_next_tokens(batch: Batch, model: Model) -> Batch:
    """The batch with what each module reads and predicts, for `loss`; call it before `sharding.balanced` moves columns."""
    options = _trained(model)
    added: dict[str, jax.Array] = {}
    for depth in range(1, options.layers + 1) if options is not None else ():
        tokens, targets, weights = mtp.next_tokens(batch, depth)
        added |= {_TOKENS.format(depth): tokens, _TARGETS.format(depth): targets, _WEIGHTS.format(depth): weights}
    return {**batch, **added}


def loss(
    model: Model, params: Params, hidden: jax.Array, batch: Batch, remat: RematPolicy, step: jax.Array | None
) -> tuple[jax.Array | float, LossSums | None]:
    """The modules' mean cross entropy times Mtp.loss_weight, summed over the batch, and their sums; 0 and None without.

    The gradient's divisor is that of the model's own loss: as in the paper, one for all depths. The balance losses of
    the modules' experts have the same factor.

    Args:
      model, params: the model and its parameters.
      hidden: its final hidden states, [B, T, D].
      batch: from `with_next_tokens`, after `sharding.balanced`.
      remat, step: as for Model.hidden.
    """
    if (options := _trained(model)) is None:
        return 0.0, None
    assert model.ahead is not None, "it has modules"
    depths = range(1, options.layers + 1)
    results, statistics = model.ahead.states(
        params, hidden, [batch[_TOKENS.format(depth)] for depth in depths], batch, remat, step
    )
    total, sums = jax.numpy.float32(0), []
    for depth, states, stats in zip(depths, results, statistics, strict=True):
        with jax.named_scope("mtp_loss"):
            of_depth, item = cross_entropy(
                states,
                model.head(params),
                batch[_TARGETS.format(depth)],
                batch[_WEIGHTS.format(depth)],
                soft_cap=model.config.logit_soft_cap,
                trains_head=model.trains_head,
            )
        total += of_depth + model.layer_loss(stats)
        sums.append(item)
    return options.loss_weight / options.layers * total, jax.tree.map(lambda *each: sum(each), *sums)


def metrics(sums: LossSums) -> dict[str, jax.Array]:
    """`mtp_loss` in nats per target, and `mtp_acceptance`, the share of targets that no other token beats."""
    if (ahead := sums.ahead) is None:
        return {}
    weight = jax.numpy.maximum(ahead.weight, 1e-30)
    return {"mtp_loss": ahead.nll / weight, "mtp_acceptance": ahead.correct / weight}


def _trained(model: Model) -> Mtp | None:
    config = model.config
    return config.mtp if isinstance(config, DecoderConfig) and config.trains_mtp else None
