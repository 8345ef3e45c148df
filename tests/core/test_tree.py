"""Names, masks and sizes over pytrees."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from capibara.core import tree

PARAMS = {
    "embedding": {"table": np.zeros((4, 2), np.float32)},
    "layers": {
        "mlp": {"kernel": jnp.zeros((3, 2, 5), jnp.bfloat16), "bias": jax.ShapeDtypeStruct((3, 5), jnp.float32)},
        "norms": [np.zeros(2, np.int8), np.zeros((), np.float64)],
    },
}
NAMES = ["embedding/table", "layers/mlp/bias", "layers/mlp/kernel", "layers/norms/0", "layers/norms/1"]


def test_path_names_in_leaf_order():
    assert tree.path_names(PARAMS) == NAMES
    assert tree.path_names({}) == []
    shapes = [leaf.shape for leaf in jax.tree.leaves(PARAMS)]
    assert dict(zip(tree.path_names(PARAMS), shapes))["layers/mlp/kernel"] == (3, 2, 5)


def test_map_with_names_keeps_the_structure():
    named = tree.map_with_names(lambda name, leaf: (name, leaf.ndim), PARAMS)
    assert named["layers"]["norms"] == [("layers/norms/0", 1), ("layers/norms/1", 0)]
    assert named["embedding"] == {"table": ("embedding/table", 2)}


def test_counts_of_arrays_and_shapes():
    assert tree.param_count(PARAMS) == 8 + 30 + 15 + 2 + 1
    assert tree.byte_count(PARAMS) == 8 * 4 + 30 * 2 + 15 * 4 + 2 * 1 + 8
    assert tree.byte_count({}) == tree.param_count({}) == 0
    huge = {"w": jax.ShapeDtypeStruct((400_000, 400_000), jnp.float32)}
    assert tree.byte_count(huge) == 640_000_000_000


def test_import_is_light():
    code = "import sys, capibara.core.tree; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


NESTED = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


def test_a_part_has_no_empty_dicts():
    assert tree.part(NESTED, lambda name: name in ("a/b", "e")) == {"a": {"b": 1}, "e": 3}
    assert tree.part(NESTED, lambda name: False) == {}


def test_a_part_and_the_rest_join_to_the_whole():
    first, rest = (tree.part(NESTED, lambda name, of=of: (name == "a/c/d") is of) for of in (True, False))
    assert tree.joined(first, rest) == tree.joined(rest, first) == NESTED
    assert tree.joined({"e": 4}, NESTED) == {**NESTED, "e": 4}  # the first one's counts
    assert tree.joined(NESTED, {}) is NESTED
