"""Checkpoints of MaxText are read as MaxText means them: logits are those of its own model.

recorded.json holds MaxText 0.2.5's arrays and results (maxtext_peer.py wrote it);

make test-peer PEER=maxtext PEER_PYTHON=PATH/bin/python    has MaxText write checkpoints and compares
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tensorstore
import yaml
from jax.sharding import SingleDeviceSharding

from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.maxtext import names
from capibara.models import api

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import maxtext_cases  # noqa: E402
from maxtext_values import TOKENS, value  # noqa: E402

PYTHON = os.environ.get("MAXTEXT_PYTHON")
RECORDED = json.loads((HERE / "recorded.json").read_text())
# In make test: interleaved heads, experts, a pattern of layers with a rest, and logits of a tied embedding.
SMALL = ("llama3.1", "mixtral", "gemma3", "llama_tied")
TOLERANCE = 5e-5  # of the largest logit


def write(folder, case, prefix="params.params.", driver="zarr3", settings=None, without=(), dtype="float32"):
    """A checkpoint as MaxText writes it, of a recorded case."""
    items = folder / "0" / "items"
    for name, shape in case["shapes"].items():
        if name in without:
            continue
        store = {"driver": "ocdbt", "base": f"file://{items}/", "path": f"{prefix}{name.replace('/', '.')}/"}
        array = tensorstore.open(
            {"driver": driver, "kvstore": store}, create=True, dtype=tensorstore.dtype(dtype), shape=shape
        ).result()
        array.write(value(name, shape).astype(array.dtype.numpy_dtype)).result()
    text = yaml.safe_dump(case["settings"] | (settings or {}))
    (folder / "config.yml").write_text(text)
    return folder


def loaded(path):
    foreign = open_model.open_model(str(path))
    model = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    open_model.check(foreign, model)
    here = SingleDeviceSharding(jax.devices()[0])
    return model, open_model.load_params(foreign, model, jax.tree.map(lambda _: here, model.abstract_params))


def logits_of(path):
    model, params = loaded(path)
    batch = {"tokens": TOKENS, "segment_ids": np.ones_like(TOKENS), "positions": np.arange(TOKENS.shape[1])[None]}
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(model.logits)(params, batch))[0]


@pytest.mark.parametrize(
    "name", [name if name in SMALL else pytest.param(name, marks=pytest.mark.heavy) for name in maxtext_cases.CASES]
)
def test_logits_are_those_of_maxtext(name, tmp_path):
    got, want = logits_of(write(tmp_path, RECORDED[name])), np.array(RECORDED[name]["logits"])
    np.testing.assert_allclose(got[::6, ::8], want, atol=TOLERANCE * np.abs(got).max())


@pytest.mark.heavy
@pytest.mark.skipif(not PYTHON, reason="MAXTEXT_PYTHON names no python with MaxText")
def test_maxtexts_own_checkpoints(tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    subprocess.run([PYTHON, HERE / "maxtext_peer.py", tmp_path], check=True, timeout=3600, env=env)
    assert json.loads((tmp_path / "recorded.json").read_text()).keys() == maxtext_cases.CASES.keys()
    for name in maxtext_cases.CASES:
        got, want = logits_of(tmp_path / name), np.load(tmp_path / name / "logits.npy")[0]
        apart = np.abs(got - want).max() / np.abs(want).max()
        print(f"{name}: logits within {apart:.1e}")
        assert apart < TOLERANCE, name


def opened(folder):
    return open_model.open_model(str(folder))


def test_a_checkpoint_a_step_and_a_run_are_named_by_their_folders(tmp_path):
    """The newest step of a run; older releases wrote Zarr's version 2."""
    case = RECORDED["llama3"]
    steps = tmp_path / "run" / "checkpoints"
    for number in (9, 10):
        write(steps / str(number), case, driver="zarr" if number == 9 else "zarr3")
        (steps / str(number) / "0" / "items").rename(steps / str(number) / "items")
        (steps / str(number) / "config.yml").rename(tmp_path / "run" / "config.yml")
    names_of = {str(path): opened(path).path for path in (tmp_path / "run", steps, steps / "9", steps / "9" / "items")}
    assert [os.path.relpath(path, steps) for path in names_of.values()] == [
        "10/items",
        "10/items",
        "9/items",
        "9/items",
    ]
    assert opened(steps / "9").shapes() == opened(steps / "10").shapes()
    value_9, value_10 = (opened(steps / n).read("model.norm.weight") for n in ("9", "10"))
    np.testing.assert_array_equal(value_9, value_10)


def test_the_same_arrays_of_another_model_name_are_another_model(tmp_path):
    """MaxText rotates heads as model_name says: what its file lacks would be read wrong in silence."""
    case, folder = copy.deepcopy(RECORDED["llama3"]), write(tmp_path, RECORDED["llama3"])
    query = opened(folder).read("model.layers.0.self_attn.q_proj.weight")
    other = opened(write(tmp_path / "named", case, settings={"model_name": "llama3.1-8b"}))
    assert other.config["rope_scaling"]["rope_type"] == "llama3"
    rotated = other.read("model.layers.0.self_attn.q_proj.weight").reshape(4, 16, -1)
    np.testing.assert_array_equal(rotated[:, :8], query.reshape(4, 16, -1)[:, ::2])
    del case["settings"]["model_name"]
    with pytest.raises(UserError, match="config.yml has no model_name: it decides"):
        opened(write(tmp_path / "unnamed", case))


def test_settings_are_those_that_maxtext_dumps_and_nothing_is_executed(tmp_path):
    folder = write(tmp_path, RECORDED["llama3.1"])
    text = (
        "decoder_block: !!python/object/apply:maxtext.common.common_types.DecoderBlockType\n- llama2\n"
        "rope_type: !!python/object/apply:maxtext.configs.types.RopeType [llama3.1]\n"
        "model_name: default\nhead_dim: 16\nmlp_activations: !!python/tuple [silu, linear]\n"
        "logical_axis_rules: !!python/tuple [[a, [b]], {c: d}]\nlora: {rank: 0}\nrope_max_timescale: 500000\n"
        f"other: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n"
    )
    (folder / "config.yml").write_text(text)
    assert opened(folder).config["rope_scaling"]["rope_type"] == "llama3" and not (tmp_path / "made").exists()
    for broken in ("- a\n", "a: [\n", "a: &a [*a]\n", "", "x\x00y", "? [a, b]\n: c\n"):
        (folder / "config.yml").write_text(broken)
        with pytest.raises(UserError, match="config.yml (is no YAML|has no model_name)"):
            opened(folder)


MISTAKES = {
    "decoder_block = 'deepseek', must be one of gemma, gemma2": {"decoder_block": "deepseek"},
    "rope_type = 'yarn', must be default or llama3.1": {"rope_type": "yarn"},
    "head_dim = 'x', must be a number": {"head_dim": "x"},
    "head_dim is 24: it must divide them": {"head_dim": 24},
    "mlp_activations = \\['relu'\\], must be one of \\[silu, linear\\], \\[gelu, linear\\]": {
        "mlp_activations": ["relu"]
    },
    "param_scan_axis = 2, must be 0 or 1": {"param_scan_axis": 2},
    "attention_type = 'local_sliding', only 'global' can be read": {"attention_type": "local_sliding"},
    "has soft caps .* which llama has not": {"final_logits_soft_cap": 30.0},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_cannot_be_read_is_refused(message, tmp_path):
    with pytest.raises(UserError, match=message):
        opened(write(tmp_path, RECORDED["llama3"], settings=MISTAKES[message]))


def test_missing_and_further_arrays_are_named(tmp_path):
    case = RECORDED["llama_unscanned"]
    with pytest.raises(
        UserError, match="llama3 is a checkpoint of MaxText, which does not say how .* write the settings"
    ):
        folder = write(tmp_path / "llama3", RECORDED["llama3"])
        (folder / "config.yml").unlink()
        opened(folder)
    with pytest.raises(UserError, match="has no matrix for model.layers.0.self_attn.q_proj.weight"):
        opened(write(tmp_path / "a", case, without=["decoder/layers_0/self_attention/query/kernel"]))
    with pytest.raises(UserError, match="layers.2.mlp.down_proj.weight"):
        loaded(write(tmp_path / "b", case, without=["decoder/layers_2/mlp/wo/kernel"]))
    more = {"shapes": case["shapes"] | {"decoder/layers_0/self_attention/query/lora_a": [32, 4]}}
    with pytest.raises(UserError, match="query/lora_a"):
        loaded(write(tmp_path / "c", case | more))


def test_a_run_begins_from_it_and_says_what_differs(tmp_path):
    """Stored in bfloat16, as converted checkpoints are."""
    folder = write(tmp_path, RECORDED["qwen3_tied"], dtype="bfloat16")
    foreign = opened(folder)
    assert foreign.dtype("model.embed_tokens.weight") == "bfloat16"
    config = hf_config.from_hf(foreign.config, dtype="float32")
    model = api.build(config)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, "float32", sharding=SingleDeviceSharding(jax.devices()[0])),
        model.abstract_params,
    )
    params = open_model.loader(str(folder), model)(target)
    np.testing.assert_array_equal(params["embedding"], value("token_embedder/embedding", (128, 32)))
    with pytest.raises(UserError, match="DecoderConfig.norm_eps is 0.001"):
        open_model.loader(str(folder), api.build(dataclasses.replace(config, norm_eps=1e-3)))


def test_each_decoder_block_has_a_case():
    assert {case["settings"]["decoder_block"] for case in RECORDED.values()} == {*names.BLOCKS}
