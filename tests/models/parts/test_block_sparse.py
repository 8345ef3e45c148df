"""Block-sparse attention: what queries see, documents of a row, cached keys, adapters, and what is refused."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from capibara.core.types import UserError
from capibara.models import api
from capibara.models.api import BlockIndexer, DecoderConfig, Rope
from capibara.models.parts.indexer import BlockChooser, blocks_of_rows

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "architectures"))

import invariances  # noqa: E402

SIZES = BlockIndexer(heads=2, head_dim=10, block=3, top=2, recent=1)
CONFIG = DecoderConfig(
    vocab_size=96,
    embed_dim=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    mlp_dim=48,
    qk_norm="head",
    layer_pattern=("global", "sparse", "sparse"),
    block_indexer=SIZES,
    rope=Rope(theta=500.0, fraction=0.5),
    dtype="float32",
)
ALONE = dataclasses.replace(CONFIG, layer_pattern=("sparse",), num_kv_heads=4)


@pytest.mark.parametrize("config", [CONFIG, ALONE])
def test_loop_cache_and_packed_rows_change_nothing(config):
    invariances.loops_are_alike(config)
    invariances.the_cache_gives_whole_rows(config)
    invariances.the_cache_gives_whole_rows(config, first=1, sizes=(1, 1, 2, 3, 1))
    invariances.documents_are_apart(config)


def test_adapters_are_of_sparse_layers_too():
    invariances.adapters_merge(CONFIG, "query", "value")


def test_short_rows_are_dense_and_long_ones_are_not():
    _, params = invariances.model_and_params(CONFIG)
    dense = dataclasses.replace(CONFIG, block_indexer=dataclasses.replace(SIZES, top=8))
    few, many = (np.asarray(invariances.logits_of(each)(params, invariances.batch_of())) for each in (CONFIG, dense))
    np.testing.assert_allclose(few[:, :6], many[:, :6], rtol=0, atol=1e-5)
    assert np.abs(few[:, 6:] - many[:, 6:]).max() > 1e-2


def test_a_query_sees_the_blocks_of_the_best_keys_and_its_own():
    chooser = BlockChooser(CONFIG, SIZES, nnx.Rngs(0))
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(1, 12, 2, 10)).astype(np.float32), rng.normal(size=(1, 12, 10)).astype(np.float32)
    bias = np.asarray(chooser.bias(jnp.asarray(q), jnp.asarray(k), blocks_of_rows(jnp.ones((1, 12), jnp.int32), 3)))
    for head in range(4):
        for query in range(12):
            scores = q[0, query, head // 2] @ k[0, : query + 1].T
            best = {block: max(scores[3 * block : 3 * block + 3]) for block in range(query // 3)}
            want = {query // 3, *sorted(best, key=best.get)[-1:]}
            assert {key // 3 for key in range(query + 1) if bias[0, head, query, key] == 0} == want


def test_nothing_trains_the_indexer():
    assert {name.rpartition("/")[0] for name in CONFIG.untrained} >= {"layers/sparse_attention/indexer"}
    model, params = invariances.model_and_params(CONFIG)
    names = {name for name in CONFIG.untrained}
    trained = model.trained(params)["layers"]["sparse_attention"]
    assert len(names) == 4 and not jax.tree.leaves(trained.get("indexer", {}))


def test_a_smaller_copy_has_smaller_keys_of_the_indexer():
    assert CONFIG.emulated({"head_dim": 8}, 0.5)["block_indexer"].head_dim == 8
    assert "DecoderConfig.block_indexer" in CONFIG.unplanned


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(block_indexer=None), "DecoderConfig.block_indexer is None"),
        (dict(layer_pattern=("global",)), "which sparse layers in layer_pattern"),
        (dict(block_indexer=BlockIndexer(heads=3)), "must divide DecoderConfig.num_heads"),
        (dict(block_indexer=BlockIndexer(heads=2, head_dim=4)), "at least the 6 dimensions"),
        (dict(inputs_attention="bidirectional"), "not supported where inputs_attention"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields, said):
    with pytest.raises(UserError, match=said):
        dataclasses.replace(CONFIG, **fields)


def test_sizes_have_limits():
    with pytest.raises(UserError, match="BlockIndexer.block is 0"):
        BlockIndexer(block=0)
    with pytest.raises(UserError, match="BlockIndexer.recent"):
        BlockIndexer(recent=3, top=2)
    assert api.build(CONFIG).start_cache(1, 8)["layers"][1]["value"].shape == (1, 2, 8, 17)
