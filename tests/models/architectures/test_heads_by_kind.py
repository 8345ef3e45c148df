"""Heads of local layers that are others, and values that are smaller than keys."""

import dataclasses
import pathlib
import sys

import pytest

from capibara.core.types import UserError
from capibara.models import api
from capibara.models.api import DecoderConfig, LocalHeads, Rope

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import invariances  # noqa: E402

CONFIG = DecoderConfig(
    vocab_size=96,
    embed_dim=32,
    num_layers=5,
    num_heads=4,
    num_kv_heads=1,
    head_dim=16,
    value_dim=12,
    mlp_dim=48,
    layer_pattern=("global", "local"),
    window=5,
    local_heads=LocalHeads(num_heads=6, num_kv_heads=2, attention_sinks="head"),
    attention_gate="head_softplus",
    rope=Rope(theta=500.0, local_theta=100.0, fraction=0.5, local_fraction=0.25),
    dtype="float32",
)


def test_each_kind_of_layer_has_its_own_heads():
    _, params = invariances.model_and_params(CONFIG)
    layers = params["layers"]
    assert layers["attention"]["value"].shape == (3, 32, 1, 12) and "sinks" not in layers["attention"]
    assert layers["local_attention"]["out"].shape == (2, 6, 12, 32) and layers["local_attention"]["sinks"].any()
    assert [layer["key"].shape[1] for layer in api.build(CONFIG).start_cache(1, 8)["layers"]] == [1, 2, 1, 2, 1]


def test_loop_cache_and_packed_rows_change_nothing():
    invariances.loops_are_alike(CONFIG)
    invariances.the_cache_gives_whole_rows(CONFIG)
    invariances.documents_are_apart(CONFIG)


def test_adapters_are_of_both_kinds_of_heads():
    invariances.adapters_merge(CONFIG, "query", "value", "out")


def test_layers_count_flops_by_their_heads():
    one_kind = dataclasses.replace(CONFIG, local_heads=None, num_kv_heads=2)
    more = api.build(CONFIG).flops_per_token(24) - api.build(one_kind).flops_per_token(24)
    of_queries = 2 * (2 * 32 * (16 + 12) + 2 * 32)  # two layers with two query heads and gates more
    of_keys = -3 * 32 * (16 + 12)  # three with one key/value head less
    keys = 5 - 25 / 48
    assert more == pytest.approx(6 * (of_queries + of_keys) + 6 * 2 * 2 * (16 + 12) * keys)


def test_a_smaller_copy_has_smaller_values():
    values = {"head_dim": 8}
    assert CONFIG.emulated(values, 0.5) == {"value_dim": 8}
    assert "DecoderConfig.value_dim" in CONFIG.unplanned
    assert "DecoderConfig.local_heads" in dataclasses.replace(CONFIG, value_dim=None).unplanned


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(value_dim=17), r"value_dim is 17, must be from 1 to head_dim \(16\)"),
        (dict(layer_pattern=("local",)), "layer_pattern has local alone"),
        (dict(positions="alibi", rope=Rope()), "not supported where positions add a bias"),
        (dict(local_heads=LocalHeads(num_kv_heads=3)), "must divide num_heads"),
        (dict(rope=Rope(local_theta=1.0, local_fraction=0.01)), "Rope.local_fraction"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields, said):
    with pytest.raises(UserError, match=said):
        dataclasses.replace(CONFIG, **fields)


def test_numbers_of_heads_and_shares_have_limits():
    with pytest.raises(UserError, match="LocalHeads.num_heads is 0"):
        LocalHeads(num_heads=0)
    with pytest.raises(UserError, match="is for layers with a local_theta"):
        Rope(local_fraction=0.5)
