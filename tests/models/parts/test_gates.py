"""Gates of norms, of latent attention and of experts: cached tokens, documents of a row, adapters, and what is refused."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.models.api import DecoderConfig, LatentAttention, Moe
from capibara.models.parts import router
from capibara.models.parts.router import Hints

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "architectures"))

import invariances  # noqa: E402

LATENT = LatentAttention(kv_rank=12, query_rank=20, rotary_dim=8, value_dim=10, queries="both")
CONFIG = DecoderConfig(
    vocab_size=96,
    embed_dim=32,
    num_layers=3,
    num_heads=4,
    head_dim=14,
    mlp_dim=48,
    latent=LATENT,
    attention_gate="sigmoid",
    norm_gate_rank=5,
    moe=Moe(num_experts=4, top_k=2, expert_dim=24, first_dense=1),
    dtype="float32",
)
OF_HEADS = dataclasses.replace(
    CONFIG, latent=dataclasses.replace(LATENT, queries="normalized"), attention_gate="head_sigmoid", moe=None
)
OF_LOGITS = dataclasses.replace(
    OF_HEADS,
    latent=None,
    attention_gate="none",
    norm_gate_rank=None,
    moe=Moe(num_experts=6, top_k=2, score="sigmoid", correction="logit", shared_experts=1),
)


@pytest.mark.parametrize("config", [CONFIG, OF_HEADS, OF_LOGITS])
def test_loop_cache_and_packed_rows_change_nothing(config):
    invariances.loops_are_alike(config)
    invariances.the_cache_gives_whole_rows(config)
    invariances.documents_are_apart(config)


def test_norms_of_experts_have_gates_and_those_of_mlps_have_none():
    _, params = invariances.model_and_params(CONFIG)
    layers = params["layers"]
    assert layers["attention_norm"]["norm_down"].shape == (3, 32, 5)
    assert layers["gated_mlp_norm"]["norm_up"].shape == (2, 5, 32) and layers["mlp_norm"].keys() == {"scale"}
    _, params = invariances.model_and_params(OF_HEADS)
    assert "gated_mlp_norm" not in params["layers"] and params["layers"]["mlp_norm"]["scale"].shape == (3, 32)


def test_adapters_are_of_gates_too():
    invariances.adapters_merge(CONFIG, "gate_up", "query_up")
    invariances.adapters_merge(OF_HEADS, "head_gate")


def test_experts_outside_of_groups_count_as_zero():
    moe = Moe(num_experts=4, top_k=2, groups=2, top_groups=1, score="sigmoid", correction="expert")
    scores = jnp.log(jnp.array([[[0.9, 0.2, 0.1, 0.1]]]))
    correction = jnp.array([0.0, -0.5, 0.0, 0.1])
    never = router._ranks(scores, moe, correction)
    zero = router._ranks(scores, dataclasses.replace(moe, outside="zero"), correction)
    np.testing.assert_allclose(never[0, 0], [0.9, -0.3, -np.inf, -np.inf], atol=1e-6)
    np.testing.assert_allclose(zero[0, 0], [0.9, -0.3, 0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_a_correction_of_logits_chooses_by_them_and_weighs_by_scores(score):
    moe = Moe(num_experts=4, top_k=2, score=score, gates="scores", correction="logit")
    logits, correction = jnp.array([[[-9.0, 4.0, 3.9, 30.0]]]), jnp.array([20.0, 0.0, 0.2, -27.0])
    choice, _ = router.choose(logits, jnp.ones((1, 1), bool), moe, correction_E=correction)
    assert choice.experts.tolist() == [[[0, 2]]]
    scores = np.asarray(jax.nn.sigmoid(logits) if score == "sigmoid" else jax.nn.softmax(logits))
    np.testing.assert_allclose(choice.gates[0, 0], scores[0, 0, [0, 2]], rtol=1e-5)


@pytest.mark.parametrize("fields", [dict(groups=2), dict(hints=Hints(domains=("a",), decay_steps=1))])
def test_a_correction_of_logits_is_not_for_what_compares_scores(fields):
    with pytest.raises(
        UserError, match="correction is 'logit', must be 'expert' or 'none' with groups above 1 and with hints"
    ):
        Moe(num_experts=4, top_k=2, correction="logit", **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(bias="attention_down", latent=None, attention_gate="none"), "bias .'attention_down'. is for MLPs"),
        (dict(norm_gate_rank=0), "norm_gate_rank is 0, must be at least 1"),
        (dict(norm_placement="sandwich"), "with norm_placement 'pre'"),
        (dict(attention_gate="none"), "must be 'sigmoid' where LatentAttention.queries is 'both'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields, said):
    with pytest.raises(UserError, match=said):
        dataclasses.replace(CONFIG, **fields)


def test_queries_of_both_latents_need_latents():
    with pytest.raises(UserError, match="queries is 'both', and query_rank None"):
        LatentAttention(kv_rank=12, queries="both")
