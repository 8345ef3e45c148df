"""capibara merge: MLPs of several models as experts, and layers of one model after those of another."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from capibara.config import reset
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig, Moe

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
from llamas import PYTHON, SIZES, assert_broken_is_named, assert_close, refused, run, weights, write  # noqa: E402

MLP = "model.layers.{}.mlp.{}_proj.weight"
EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
THEIRS = {"gate": "w1", "up": "w3", "down": "w2"}  # Mixtral's names
ROUTER = "model.layers.{}.block_sparse_moe.gate.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders base, a, b, c of small Llamas."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "a", "b", "c")):
        write(folder / name, seed)
    reset()
    return folder


def logits(folder):
    """Of some tokens, in float32."""
    foreign = open_model.open_model(str(folder))
    model = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = open_model.load_params(foreign, model, jax.tree.map(lambda _: one, model.abstract_params))
    tokens = np.random.default_rng(0).integers(0, 258, (2, 12)).astype(np.int32)
    batch = {
        "tokens": tokens,
        "segment_ids": np.ones_like(tokens),
        "positions": np.tile(np.arange(12, dtype=np.int32), (2, 1)),
    }
    return np.asarray(model.logits(params, batch))


def test_each_expert_is_a_models_mlp_and_the_rest_their_mean(models, tmp_path):
    given = [weights(models / name) for name in "abc"]
    argv = [models / name for name in "abc"]
    assert run(*argv, "--method=moe", "--weights=2,1,1", "--top_k=3", f"--to={tmp_path}/out") == 0
    got = weights(tmp_path / "out")
    for layer in range(2):
        for (ours, theirs), (e, one) in ((p, o) for p in THEIRS.items() for o in enumerate(given)):
            np.testing.assert_array_equal(got[EXPERT.format(layer, e, theirs)], one[MLP.format(layer, ours)])
    shared = [name for name in given[0] if ".mlp." not in name]
    assert len(got) == len(shared) + 2 * (1 + 3 * 3)
    for name in shared:
        want = (2 * given[0][name] + given[1][name] + given[2][name]) / 4
        np.testing.assert_allclose(got[name], want, rtol=0, atol=1e-6, err_msg=name)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"] == ["MixtralForCausalLM"] and values["eos_token_id"] == 0
    assert (values["num_local_experts"], values["num_experts_per_tok"]) == (3, 3)
    report = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert report["method"] == "moe" and report["model_type"] == "mixtral" and report["tensors"] == len(got)
    assert np.isfinite(logits(tmp_path / "out")).all()


def test_with_a_base_the_rest_is_its(models, tmp_path):
    assert run(models / "a", models / "b", "--method=moe", f"--base={models}/base", f"--to={tmp_path}/out") == 0
    got, base = weights(tmp_path / "out"), weights(models / "base")
    for name in base:
        if ".mlp." not in name:
            np.testing.assert_array_equal(got[name], base[name], err_msg=name)


def test_experts_that_are_all_one_model_compute_what_it_does(models, tmp_path):
    """Gates sum to 1, whatever the routers say."""
    assert run(models / "a", models / "a", models / "a", "--method=moe", f"--to={tmp_path}/out") == 0
    np.testing.assert_allclose(logits(tmp_path / "out"), logits(models / "a"), rtol=0, atol=2e-5)


def test_routers_are_those_of_the_seed_and_the_layer(models, tmp_path):
    argv = [models / "a", models / "b", "--method=moe"]
    for name, seed, scale in (("one", 1, 1), ("again", 1, 3), ("other", 2, 1)):
        assert run(*argv, f"--to={tmp_path}/{name}", f"--seed={seed}", f"--gin.Mixture.router_scale={scale}.0") == 0
    one, again, other = (weights(tmp_path / name) for name in ("one", "again", "other"))
    first, second = (one[ROUTER.format(layer)] for layer in range(2))
    assert first.shape == (2, 32) and not np.array_equal(first, second)
    np.testing.assert_allclose(again[ROUTER.format(0)], 3 * first, rtol=1e-6)
    assert not np.array_equal(other[ROUTER.format(0)], first)
    assert 0.7 < np.std(np.concatenate([first, second])) * 32**0.5 < 1.3


def test_models_with_norms_of_queries_become_the_mixture_that_has_them(tmp_path):
    for seed, name in ((1, "one"), (2, "two")):
        write(tmp_path / name, seed, qk_norm="head", head_dim=8)
    assert run(tmp_path / "one", tmp_path / "two", "--method=moe", f"--to={tmp_path}/out") == 0
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["model_type"], values["num_experts"], values["norm_topk_prob"]) == ("qwen3_moe", 2, True)
    got, want = weights(tmp_path / "out"), weights(tmp_path / "two")[MLP.format(1, "down")]
    np.testing.assert_array_equal(got["model.layers.1.mlp.experts.1.down_proj.weight"], want)


def test_layers_come_one_after_the_other(models, tmp_path):
    a, b = models / "a", models / "b"
    argv = [a, b, a, "--method=passthrough", "--layers=0:2,1:2,0:1", "--format=gguf"]
    assert run(*argv, f"--to={tmp_path}/out.gguf", "--dtype=f32") == 0
    assert run(tmp_path / "out.gguf", "--method=passthrough", f"--to={tmp_path}/out") == 0
    got, of_a, of_b = weights(tmp_path / "out"), weights(a), weights(b)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 4
    sources = [(of_a, 0), (of_a, 1), (of_b, 1), (of_a, 0)]
    want = {name: value for name, value in of_a.items() if ".layers." not in name}
    for i, (one, layer) in enumerate(sources):
        own = {name: value for name, value in one.items() if f".layers.{layer}." in name}
        want |= {name.replace(f".layers.{layer}.", f".layers.{i}."): value for name, value in own.items()}
    assert_close(got, want, 0)


def test_what_is_after_the_layers_is_the_last_models(models, tmp_path):
    argv = [models / "a", models / "b", "--method=passthrough", "--layers=0:1,1:2", "--scale=2"]
    assert run(*argv, f"--to={tmp_path}/out") == 0
    got, of_a, of_b = (weights(folder) for folder in (tmp_path / "out", models / "a", models / "b"))
    np.testing.assert_array_equal(got["model.embed_tokens.weight"], 2 * of_a["model.embed_tokens.weight"])
    for name in ("model.norm.weight", "lm_head.weight"):
        np.testing.assert_array_equal(got[name], 2 * of_b[name])


def test_a_layer_keeps_its_window(tmp_path):
    of = DecoderConfig(
        **SIZES | {"num_layers": 4, "qk_norm": "head", "head_dim": 8}, window=4, layer_pattern=("global", "local")
    )
    write(tmp_path / "model", 1, of=of)
    argv = [tmp_path / "model", tmp_path / "model", "--method=passthrough", f"--to={tmp_path}/out"]
    assert run(*argv, "--layers=1:2,1:4") == 0
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert (values["layer_types"], values["sliding_window"]) == (kinds, 4)
    assert run(*argv[:3], f"--to={tmp_path}/full", "--layers=0:1,2:3") == 0
    assert "sliding_attention" not in json.loads((tmp_path / "full" / "config.json").read_text())["layer_types"]


def test_layers_keep_the_kinds_of_their_own_models_and_models_may_differ_in_depth(tmp_path, capfd):
    def sliding(name, layers, pattern, window=4):
        of = DecoderConfig(
            **SIZES | {"num_layers": layers, "qk_norm": "head", "head_dim": 8}, window=window, layer_pattern=pattern
        )
        write(tmp_path / name, 1, of=of)

    sliding("a", 2, ("global", "local"))
    sliding("b", 4, ("local", "global"))
    argv = [tmp_path / "a", tmp_path / "b", "--method=passthrough"]
    assert run(*argv, "--layers=0:2,0:3", f"--to={tmp_path}/out") == 0
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    full, local = "full_attention", "sliding_attention"
    assert values["layer_types"] == [full, local, local, full, local] and values["num_hidden_layers"] == 5
    assert f"layers has 3:5, must end at 4, the number of layers of {tmp_path}/b" in refused(
        capfd, *argv, "--layers=0:2,3:5", f"--to={tmp_path}/no"
    )
    sliding("c", 2, ("global", "local"), window=8)
    argv[1] = tmp_path / "c"
    assert f"the window of {tmp_path}/c is 8, must be 4 as of {tmp_path}/a" in refused(
        capfd, *argv, "--layers=0:2,0:2", f"--to={tmp_path}/no"
    )
    assert run(*argv, "--layers=0:2,0:1", f"--to={tmp_path}/full") == 0
    assert json.loads((tmp_path / "full" / "config.json").read_text())["sliding_window"] == 4


def test_a_tied_head_is_the_first_models_embedding(tmp_path):
    for seed, name in ((1, "a"), (2, "b")):
        write(tmp_path / name, seed, head="tied")
    argv = [tmp_path / "a", tmp_path / "b", "--method=passthrough", "--layers=0:1,1:2", f"--to={tmp_path}/out"]
    assert run(*argv) == 0
    got, of_a, of_b = (weights(tmp_path / name) for name in ("out", "a", "b"))
    np.testing.assert_array_equal(got["model.embed_tokens.weight"], of_a["model.embed_tokens.weight"])
    np.testing.assert_array_equal(got["model.norm.weight"], of_b["model.norm.weight"])
    assert "lm_head.weight" not in got


def test_mistakes_are_one_line_and_leave_nothing(models, tmp_path, capfd):
    a, b, to = models / "a", models / "b", f"--to={tmp_path}/out"
    write(tmp_path / "biased", 1, bias="qkv")
    write(tmp_path / "experts", 1, moe=Moe(num_experts=4))
    both = EncoderDecoderConfig(vocab_size=258, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=24, head="separate")
    write(tmp_path / "both", 1, of=both)
    before = sorted(os.listdir(tmp_path))

    def twice(name, *flags):
        return refused(capfd, tmp_path / name, tmp_path / name, to, *flags)

    moe, layers = "--method=moe", "--method=passthrough"
    assert "moe is given 1 models, must have at least 2" in refused(capfd, a, to, moe)
    assert "top_k is 3, must be at most the 2 models: try 2" in refused(capfd, a, b, to, moe, "--top_k=3")
    for top_k in (0, 1):
        assert f"top_k is {top_k}, must be at least 2" in refused(capfd, a, b, to, moe, f"--top_k={top_k}")
    assert "--top_k=x must be a whole number" in refused(capfd, a, b, to, moe, "--top_k=x")
    assert "router_scale is 0" in refused(capfd, a, b, to, moe, "--gin.Mixture.router_scale=0.0")
    assert "weights are 1, -1, their sum" in refused(capfd, a, b, to, moe, "--weights=1,-1")
    with_base = (f"--base={models}/base", "--weights=1,2")
    assert "with a base there is none" in refused(capfd, a, b, to, moe, *with_base)
    assert f"{tmp_path}/biased cannot become a mixture, because transformers has none" in twice("biased", moe)
    assert f"{tmp_path}/experts has experts already" in twice("experts", moe)
    for flags in ((moe,), (layers, "--layers=0:1,0:1")):
        assert f"{tmp_path}/both has the architecture EncoderDecoderConfig, must have" in twice("both", *flags)
    assert "layers has 1 range, must have one for each of the 2 models" in refused(
        capfd, a, b, to, layers, "--layers=0:1"
    )
    assert "layers has 1:3, must end at 2, the number of layers" in refused(capfd, a, to, layers, "--layers=1:3")
    for wrong in ("1:1", "2:1"):
        assert f"layers has {wrong}, must be the first layer" in refused(capfd, a, to, layers, f"--layers={wrong}")
    for wrong in ("1", "1:2:3", "a:b", "", "0-1"):
        assert f"--layers={wrong} must be ranges of layers" in refused(capfd, a, to, layers, f"--layers={wrong}")
    assert "--layers=0:1 is not a setting of linear, but of passthrough" in refused(
        capfd, a, b, to, "--method=linear", "--layers=0:1"
    )
    assert sorted(os.listdir(tmp_path)) == before


def test_an_experts_value_that_is_not_finite_names_its_model(models, tmp_path, capfd):
    assert_broken_is_named(capfd, models, tmp_path, "--method=moe", MLP.format(1, "up"), np.inf)


def apart(theirs):
    """mergekit's mixture under Mixtral's names; with transformers 5.24 it has those of a module whose experts are one array."""
    found = {}
    for name, value in theirs.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else None
        if name.endswith(".mlp.gate.weight"):
            found[ROUTER.format(layer)] = value
        elif name.endswith(".experts.down_proj"):
            found |= {EXPERT.format(layer, number, "w2"): one for number, one in enumerate(value)}
        elif name.endswith(".experts.gate_up_proj"):
            for number, one in enumerate(value):
                found[EXPERT.format(layer, number, "w1")], found[EXPERT.format(layer, number, "w3")] = np.split(one, 2)
        else:
            found[name] = value
    return found


@pytest.mark.heavy
@pytest.mark.skipif(not PYTHON, reason="MERGEKIT_PYTHON names no python with mergekit")
def test_parts_are_put_together_as_by_mergekit(models, tmp_path):
    def mergekit(script, about, name):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(about))
        program = pathlib.Path(PYTHON).parent / script
        subprocess.run([PYTHON, str(program), f"{tmp_path}/{name}.yaml", f"{tmp_path}/{name}"], check=True)
        return weights(tmp_path / name)

    a, b = f"{models}/a", f"{models}/b"
    slices = [{"sources": [{"model": one, "layer_range": at}]} for one, at in ((a, [0, 2]), (b, [1, 2]), (a, [0, 1]))]
    theirs = mergekit("mergekit-yaml", {"merge_method": "passthrough", "dtype": "float32", "slices": slices}, "slices")
    assert run(a, b, a, "--method=passthrough", "--layers=0:2,1:2,0:1", f"--to={tmp_path}/ours") == 0
    assert_close(weights(tmp_path / "ours"), theirs, 0)
    experts = [{"source_model": one, "positive_prompts": [""]} for one in (a, b)]
    about = {"base_model": f"{models}/base", "gate_mode": "random", "dtype": "float32", "experts": experts}
    theirs = apart(mergekit("mergekit-moe", about, "moe"))
    assert run(a, b, "--method=moe", f"--base={models}/base", f"--to={tmp_path}/mixture") == 0
    ours = weights(tmp_path / "mixture")
    routers = {ROUTER.format(layer) for layer in range(2)}
    assert {name: value.shape for name, value in ours.items()} == {name: v.shape for name, v in theirs.items()}
    assert_close({n: ours[n] for n in ours if n not in routers}, {n: theirs[n] for n in ours if n not in routers}, 0)
