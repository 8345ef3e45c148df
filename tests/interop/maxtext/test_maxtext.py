"""Checkpoints of MaxText are read as MaxText means them: logits are those of its own model.

recorded.json holds MaxText 0.2.5's arrays and results (maxtext_peer.py wrote it);

make test-peer PEER=maxtext PEER_PYTHON=PATH/bin/python    has MaxText write checkpoints and compares
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
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
from capibara.interop.maxtext import names, read
from capibara.interop.zarr import arrays
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
    written = []
    for name, shape in case["shapes"].items():
        if name in without:
            continue
        store = {"driver": "ocdbt", "base": f"file://{items}/", "path": f"{prefix}{name.replace('/', '.')}/"}
        array = tensorstore.open(
            {"driver": driver, "kvstore": store}, create=True, dtype=tensorstore.dtype(dtype), shape=shape
        ).result()
        written.append(array.write(value(name, shape).astype(array.dtype.numpy_dtype)))
    for writing in written:
        writing.result()
    return configure(folder, case, settings)


def configure(folder, case, settings=None):
    (folder / "config.yml").write_text(yaml.safe_dump(case["settings"] | (settings or {})))
    return folder


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Checkpoints that tests only read; they write config.yml anew."""
    return {
        name: write(tmp_path_factory.mktemp(name), RECORDED[name]) for name in ("llama3", "gemma3", "olmo3", "qwen3")
    }


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
    for unfinished in ("11", "12.orbax-checkpoint-tmp", "\u00b2"):
        (steps / unfinished / "items").mkdir(parents=True)
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
        "model_name: default\nhead_dim: 16\nnormalization_layer_epsilon: 1e-6\nmlp_activations: !!python/tuple [silu, linear]\n"
        "logical_axis_rules: !!python/tuple [[a, [b]], {c: d}]\nlora: {rank: 0}\nrope_max_timescale: 500000\n"
        f"other: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n"
    )
    (folder / "config.yml").write_text(text)
    config = opened(folder).config
    assert config["rope_scaling"]["rope_type"] == "llama3" and not (tmp_path / "made").exists()
    assert config["rms_norm_eps"] == 1e-6  # as MaxText's files of models have it, which YAML 1.1 takes for text
    nested = "a: " + "[" * 5000
    doubled = "head_dim: 16\nhead_dim: 8\n"
    tagged = [f"a: !!{tag} ''\n" for tag in ("bool", "int", "float")]
    for broken in (
        "- a\n",
        "a: [\n",
        "a: &a [*a]\n",
        "",
        "x\x00y",
        "? [a, b]\n: c\n",
        nested,
        doubled,
        "<<: {a: b}",
        *tagged,
    ):
        (folder / "config.yml").write_text(broken)
        with pytest.raises(UserError, match="config.yml (is no file of settings|has no model_name)"):
            opened(folder)
    (folder / "config.yml").write_bytes(b"a: \xff")
    with pytest.raises(UserError, match="config.yml is no text in UTF-8 .*: copy it again$"):
        opened(folder)


MISTAKES = {
    "decoder_block = 'deepseek', must be one of gemma, gemma2": {"decoder_block": "deepseek"},
    "rope_type = 'yarn', must be default or llama3.1": {"rope_type": "yarn"},
    "head_dim = 'x', must be a positive number": {"head_dim": "x"},
    "head_dim = 8, the arrays of .* have \\[16\\]": {"head_dim": 8},
    "head_dim = 16.5, must be a whole number": {"head_dim": 16.5},
    "head_dim = True, must be a positive number": {"head_dim": True},
    "normalization_layer_epsilon = nan, must be a positive number": {"normalization_layer_epsilon": math.nan},
    "rope_max_timescale = inf, must be a positive number": {"rope_max_timescale": math.inf},
    "rope_linear_scaling_factor = 0, must be a positive number": {"rope_linear_scaling_factor": 0},
    "max_target_length = -1, must be a positive number": {"max_target_length": -1},
    "logits_via_embedding = true, .* has the array decoder/logits_dense/kernel": {"logits_via_embedding": True},
    "base_num_decoder_layers = 5, the arrays have 4": {"base_num_decoder_layers": 5},
    "num_kv_heads = 4, the arrays have 2": {"num_kv_heads": 4, "base_num_kv_heads": 1, "global_parameter_scale": 4},
    "moba = True, only False can be read": {"moba": True},
    "weight_sparsity_n = 2, only None can be read": {"weight_sparsity_n": 2},
    "base_config = 'mine.yml', only 'base.yml' can be read": {"base_config": "mine.yml"},
    "mlp_activations = \\['relu'\\], must be one of \\[silu, linear\\], \\[gelu, linear\\]": {
        "mlp_activations": ["relu"]
    },
    "param_scan_axis = 2, must be 0 or 1": {"param_scan_axis": 2},
    "attention_type = 'local_sliding', only 'global' can be read": {"attention_type": "local_sliding"},
    "has soft caps .* which llama has not": {"attn_logits_soft_cap": 30.0},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_cannot_be_read_is_refused(message, stores):
    with pytest.raises(UserError, match=message):
        opened(configure(stores["llama3"], RECORDED["llama3"], MISTAKES[message]))


PATTERN_MISTAKES = [
    ("gemma3", "model_name = 'gemma3-1b', must be one of gemma3-4b", {"model_name": "gemma3-1b"}),
    ("gemma3", "normalization_layer_epsilon = 1e-05, must be 1e-6", {"normalization_layer_epsilon": 1e-5}),
    ("gemma3", "rope_type = 'llama3.1' .* layers with a window", {"rope_type": "llama3.1"}),
    ("gemma3", "sliding_window_size = 0, must be a positive number", {"sliding_window_size": 0}),
    ("gemma3", "attn_logits_soft_cap = -1, must be a positive number", {"attn_logits_soft_cap": -1}),
    ("olmo3", "rope_linear_scaling_factor = 2.0: .* layers with a window", {"rope_linear_scaling_factor": 2.0}),
    ("olmo3", "rope_type = 'llama3.1' .* layers with a window", {"rope_type": "llama3.1"}),
    ("olmo3", "has local_rope_max_timescale, which olmo3 has not", {"local_rope_max_timescale": 10}),
    ("gemma3", "normalize_embedding_logits = 1, must be true or false", {"normalize_embedding_logits": 1}),
    ("qwen3", "rope_use_scale = 'false', must be true or false", {"rope_use_scale": "false", "rope_type": "llama3.1"}),
]


@pytest.mark.parametrize("name, message, changed", PATTERN_MISTAKES)
def test_settings_that_a_family_cannot_have_are_refused(name, message, changed, stores):
    with pytest.raises(UserError, match=message):
        opened(configure(stores[name], RECORDED[name], changed))


def test_settings_change_what_arrays_mean(stores):
    """As MaxText reads them: norms of interleaved heads, a Gemma head that is not divided, and caps of embeddings' logits alone."""
    scale = "model.layers.1.self_attn.q_norm.weight"
    plain = opened(configure(stores["qwen3"], RECORDED["qwen3"])).read(scale)
    rotated = opened(configure(stores["qwen3"], RECORDED["qwen3"], {"rope_type": "llama3.1"})).read(scale)
    np.testing.assert_array_equal(rotated, np.concatenate([plain[::2], plain[1::2]]))
    embedding = value("token_embedder/embedding", (128, 32))
    gemma = opened(configure(stores["gemma3"], RECORDED["gemma3"], {"normalize_embedding_logits": False}))
    np.testing.assert_array_equal(gemma.read("lm_head.weight"), embedding)
    np.testing.assert_array_equal(gemma.read("model.embed_tokens.weight"), embedding / np.sqrt(np.float32(32)))
    assert gemma.config["tie_word_embeddings"] is False
    gemma = opened(
        configure(
            stores["gemma3"], RECORDED["gemma3"], {"rope_linear_scaling_factor": 8.0, "final_logits_soft_cap": 30}
        )
    )
    assert (
        gemma.config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
        and "lm_head.weight" not in gemma.shapes()
    )
    assert gemma.config["final_logit_softcapping"] == 30 and gemma.config["query_pre_attn_scalar"] == 16
    large = {"model_name": "gemma3-27b", "base_emb_dim": 32, "base_num_query_heads": 4}
    assert opened(configure(stores["gemma3"], RECORDED["gemma3"], large)).config["query_pre_attn_scalar"] == 8
    scaled = {"final_logits_soft_cap": 30.0, "base_num_kv_heads": 1, "num_kv_heads": 2, "global_parameter_scale": 4}
    llama = opened(configure(stores["llama3"], RECORDED["llama3"], scaled))
    assert llama.config["model_type"] == "llama" and "final_logit_softcapping" not in llama.config


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


def test_a_layer_of_gemma2_is_two():
    kernel = "self_attention/query/kernel"
    local, last = (names.place(f"decoder/layers_3/self_attention_{kind}/query/kernel") for kind in ("local", "global"))
    assert local == names.Place(kernel, 0, 3) and last == names.Place(kernel, 1, 3)


def test_layers_are_stacked_along_param_scan_axis(stores, tmp_path, monkeypatch):
    first = opened(configure(stores["llama3"], RECORDED["llama3"])).read("model.layers.2.self_attn.o_proj.weight")
    case, shapes = RECORDED["llama3"], RECORDED["llama3"]["shapes"]
    moved = {name: [shape[1], shape[0], *shape[2:]] if "/layers/" in name else shape for name, shape in shapes.items()}

    def swapped(name, _, plain=value):
        result = plain(name, shapes[name])
        return np.swapaxes(result, 0, 1) if "/layers/" in name else result

    monkeypatch.setattr(sys.modules[__name__], "value", swapped)
    folder = write(tmp_path, {**case, "shapes": moved}, settings={"param_scan_axis": 0})
    np.testing.assert_array_equal(opened(folder).read("model.layers.2.self_attn.o_proj.weight"), first)


def test_arrays_that_contradict_each_other_are_refused(tmp_path, monkeypatch):
    case, norm = RECORDED["llama_unscanned"], "decoder/layers_2/pre_self_attention_layer_norm/scale"
    folder = write(tmp_path, {**case, "shapes": case["shapes"] | {norm.replace("_2", "_02"): [32]}})
    with pytest.raises(UserError, match="layers_02.* are both model.layers.2.input_layernorm.weight: remove one"):
        opened(folder)
    folder = write(
        tmp_path / "tied",
        {**case, "settings": case["settings"] | {"logits_via_embedding": False}},
        without=[names.OUTPUT],
    )
    with pytest.raises(UserError, match="logits_via_embedding = false, .* has no decoder/logits_dense/kernel: copy"):
        opened(folder)
    experts = RECORDED["mixtral"]
    folder = write(
        tmp_path / "flat", {**experts, "shapes": experts["shapes"] | {"decoder/layers/MoeBlock_0/wi_0": [4, 4]}}
    )
    with pytest.raises(UserError, match=r"wi_0 has the shape \[4, 4\], must be matrices of at most 4,096 experts"):
        opened(folder)
    folder = configure(write(tmp_path / "experts", experts), experts, {"num_experts_per_tok": 5})
    with pytest.raises(UserError, match="num_experts_per_tok = 5, the arrays have 4 experts"):
        opened(folder)
    monkeypatch.setattr(read, "_MOST_TENSORS", 40)
    with pytest.raises(UserError, match="more than 40 matrices"):
        opened(folder)
    (folder / "0" / "items" / "linked").symlink_to(tmp_path)
    arrays.stored_in.cache_clear()
    with pytest.raises(UserError, match="linked is a link, must be a file or folder"):
        opened(folder)


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
