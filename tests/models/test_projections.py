"""core/projections.py declares every projection: layers make their weights by it, and nothing repeats its names."""

import ast
import collections
import pathlib

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest

import capibara
from capibara.core import projections, tree
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig, Gemma3nConfig, Moe

SIZES = {"vocab_size": 64, "embed_dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
CONFIGS = {
    "decoder": DecoderConfig(**SIZES, mlp_dim=24),
    "experts": DecoderConfig(**SIZES, mlp_dim=24, moe=Moe(num_experts=4, top_k=2, shared_experts=1)),
    "encoder-decoder": EncoderDecoderConfig(**{**SIZES, "num_kv_heads": 4}, num_encoder_layers=2, mlp_dim=24),
    "gemma3n": Gemma3nConfig(
        **{**SIZES, "num_layers": 4}, mlp_dim=24, layer_pattern=("local", "global"), window=4, streams=2, laurel_rank=4,
        per_layer_dim=8, per_layer_vocab_size=64, kv_shared_layers=2,
    ),
}  # fmt: skip
# Matrices of layers that adapters do not support, or that are stored separately (the router's).
OTHERS = {"router", "modality_router", "prediction", "correction"}


def weights(model):
    """(module, parameter, logical axes) of the matrices of a model's layers."""
    axes = jax.tree.leaves(model.axes, is_leaf=lambda x: isinstance(x, tuple))
    for name, of in zip(tree.path_names(model.abstract_params), axes, strict=True):
        *owner, part, last = ("", *name.split("/"))
        if "layers" in owner and len(of) > 2 and not last.endswith("_bias"):
            yield part.removeprefix("cross_"), last, of[1:]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_has_the_projections_that_are_declared(name):
    declared = {(one.part, one.name, one.axes) for one in projections.ALL}
    found = {one for one in weights(api.build(CONFIGS[name])) if one[1] not in OTHERS}
    assert found and found <= declared
    of_layers = projections.of_layer(gated=True, experts=name == "experts")
    assert {(one.part, one.name, one.axes) for one in of_layers} <= found


def names_of(jaxpr):
    """Names that a program gives to its intermediate results."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"]
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from names_of(inner)


@pytest.mark.parametrize("name", ["decoder", "experts"])
def test_a_layer_names_the_results_that_are_declared(name):
    model, batch = api.build(CONFIGS[name]), {"tokens": jnp.zeros((1, 8), jnp.int32)}
    batch |= {"segment_ids": batch["tokens"] + 1, "positions": jnp.arange(8, dtype=jnp.int32)[None]}
    program = jax.make_jaxpr(lambda params: model.logits(params, batch))(model.abstract_params)
    of_layer = projections.of_layer(gated=True, experts=name == "experts")
    assert {*names_of(program.jaxpr)} == {projections.ATTENDED, *(one.result for one in of_layer)}


def test_contracted_dimensions_are_those_of_the_inputs():
    assert [one.in_axes for one in projections.ATTENTION] == [("embed",)] * 3 + [("heads", "head_dim")]
    assert [one.contracted for one in projections.EXPERTS] == [(1,)] * 3
    assert projections.readers("attention/query") == ("query", "key", "value")
    assert projections.readers("mlp/up") == ("up", "gate") and projections.readers("mlp/down") == ("down",)


def test_no_other_module_lists_their_names():
    """Two or more of a layer's names in a tuple, list, set or dict are a list of projections."""
    known = {one.name for one in projections.ATTENTION + projections.MLP} | {*projections.RESULTS}
    allowed = {
        "models/adapters/lora.py": 1,  # the default of Lora.targets, which users choose
        "interop/hf/layout/rows.py": 1,  # Hugging Face's names
        "interop/hf/catalog/older/falcon.py": 1,
        "interop/t5x/names.py": 1,  # T5X's name for each
        "interop/maxtext/names.py": 4,  # MaxText's name for each
        "planner/search/ranking.py": 1,  # which of them may go to the host's memory together
        "interop/experts/operation.py": 1,  # where each has the hidden units of an expert
    }
    root, found = pathlib.Path(capibara.__file__).parent, collections.Counter()
    for path in root.rglob("*.py"):
        if path.name == "projections.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            values = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else []
            values = node.keys if isinstance(node, ast.Dict) else values
            names = {one.value for one in values if isinstance(one, ast.Constant)} & known
            if len(names) > 1 and names != {"key", "value"}:  # a cache has these
                found[str(path.relative_to(root))] += 1
    assert found == allowed
