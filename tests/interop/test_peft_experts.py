"""Adapters of experts in PEFT's two layouts against PEFT's own answers (golden/make_peft_experts.py), and back."""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from capibara.core import tree
from capibara.core.types import UserError
from capibara.interop.hf import tables
from capibara.interop.hf.layout import tensors
from capibara.interop.peft import folder as peft
from capibara.models import api
from capibara.models.api import Lora

safetensors = pytest.importorskip("safetensors.numpy")
GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "models" / "golden"
ANSWERS = json.loads((GOLDEN / "peft_experts.json").read_text())
sys.path.insert(0, str(GOLDEN))
import answers  # noqa: E402
import mixtures  # noqa: E402

CASES = ("mixtral_fused", "qwen3_moe_fused", "gpt_oss_fused", "mixtral", "qwen3_moe")
LAYER = "base_model.model.model.layers.1."


def base_of(name):
    """The plain model, and the reference's parameters."""
    model = api.build(mixtures.CONFIGS[name])
    names = tree.path_names(model.abstract_params)
    shapes = {name: leaf.shape for name, leaf in zip(names, jax.tree.leaves(model.abstract_params), strict=True)}
    values = tensors.read(tables.of(name, shapes, {}, fused_experts=True), shapes, answers.draw)
    return model, tree.map_with_names(lambda name, _: values[name], model.abstract_params)


def folder_of(case, path, changes=()):
    """The folder that PEFT wrote."""
    answer = ANSWERS[case]
    drawn = {name: answers.draw(name, tuple(shape)) for name, shape in answer["tensors"].items()}
    safetensors.save_file(drawn, path / peft.WEIGHTS)
    (path / peft.CONFIG).write_text(json.dumps(answer["config"] | dict(changes)))
    return str(path)


def logits(model, params):
    tokens = np.array(ANSWERS["tokens"], np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    return np.asarray(jax.jit(model.logits)(params, batch))[-1]


@pytest.mark.parametrize("case", CASES)
def test_adapters_of_peft_answer_as_there_and_are_written_as_they_were(case, tmp_path):
    name, fused = case.removesuffix("_fused"), case.endswith("_fused")
    plain, base = base_of(name)
    lora, adapters = peft.read_peft(folder_of(case, tmp_path), plain, name)
    model = api.build(dataclasses.replace(plain.config, lora=lora))
    assert tree.path_names(adapters) == tree.path_names(model.trained(model.abstract_params))
    params = tree.joined(adapters, base)
    got = logits(model, params)[np.ix_(ANSWERS["positions"], ANSWERS["entries"])]
    np.testing.assert_allclose(got, ANSWERS[case]["logits"], rtol=0, atol=2e-4)
    assert np.abs(got - logits(plain, base)[np.ix_(ANSWERS["positions"], ANSWERS["entries"])]).max() > 0.1
    again = tmp_path / "again"
    peft.write_peft(str(again), params, model, name, fused_experts=fused)
    first, second = (safetensors.load_file(path / peft.WEIGHTS) for path in (tmp_path, again))
    assert first.keys() == second.keys()
    for key, value in first.items():
        np.testing.assert_array_equal(second[key], value)
    config, want = json.loads((again / peft.CONFIG).read_text()), ANSWERS[case]["config"]
    assert sorted(config["target_modules"]) == sorted(want["target_modules"])
    ends = [name.removeprefix("experts.") for name in want["target_parameters"] or ()]
    assert sorted(config.get("target_parameters", ())) == sorted(ends)
    assert config["use_rslora"] == want["use_rslora"] and config["lora_dropout"] == 0.0
    assert peft.read_peft(str(again), plain, name)[0] == lora


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_written_computes_the_same_in_both_layouts(fused, tmp_path):
    """Gate and up with different ranks, or only one of them, become one adapter; rsLoRA's scale is kept."""
    plain, base = base_of("mixtral")
    for index, lora in enumerate((
        Lora(rank=2, alpha=4.0, targets=("all-linear",), rank_pattern=(("up", 3), ("down", 1)), rslora=True),
        Lora(rank=2, alpha=4.0, targets=("up", "query"), dropout=0.1),
    )):  # fmt: skip
        model = api.build(dataclasses.replace(plain.config, lora=lora))
        new = jax.jit(model.adapt)(base, jax.random.key(0))
        params = tree.map_with_names(lambda n, x: answers.draw(n, x.shape) if n.endswith("_lora/b") else x, new)
        target = tmp_path / str(index)
        peft.write_peft(str(target), params, model, "mixtral", fused_experts=fused)
        shapes = {name: value.shape for name, value in safetensors.load_file(target / peft.WEIGHTS).items()}
        config = json.loads((target / peft.CONFIG).read_text())
        if fused:  # [experts * rank, inputs] and [outputs, rank * experts]
            inner = "mlp.experts.base_layer.lora_" if index == 0 else "mlp.experts.lora_"
            rank = 5 if index == 0 else 2
            assert (shapes[f"{LAYER}{inner}A.weight"], shapes[f"{LAYER}{inner}B.weight"]) == (
                (8 * rank, 32), (96, rank * 8)
            )  # fmt: skip
            assert config["target_parameters"] == (
                ["gate.weight", "gate_up_proj", "down_proj"] if index == 0 else ["gate_up_proj"]
            )
        else:  # loadable as one parameter: both without a pattern for rank or alpha, and without rsLoRA
            rank = 3 if index == 0 else 2
            for part in ("w1", "w3"):
                assert shapes[f"{LAYER}block_sparse_moe.experts.7.{part}.lora_A.weight"] == (rank, 32)
            assert (
                config["r"] == rank and not config["use_rslora"] and {"w1", "w2", "w3"} <= {*config["target_modules"]}
            )
            assert config["rank_pattern"].get("down_proj") == (1 if index == 0 else None)
        read, adapters = peft.read_peft(str(target), plain, "mixtral")
        theirs = api.build(dataclasses.replace(plain.config, lora=read))
        want, got = jax.jit(model.merge)(params), jax.jit(theirs.merge)(tree.joined(adapters, base))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def test_a_router_alone_is_a_parameter_too(tmp_path):
    """With transformers 5 PEFT refuses dropout and DoRA for a router, as for experts."""
    plain, base = base_of("mixtral")
    for kind, lora in {
        "dropped": Lora(rank=2, targets=("router", "query"), dropout=0.1),
        "dora": Lora(rank=2, targets=("router", "query"), dora=True),
    }.items():
        model = api.build(dataclasses.replace(plain.config, lora=lora))
        params = jax.jit(model.adapt)(base, jax.random.key(0))
        for fused in (False, True):
            target = tmp_path / f"{kind}_{fused}"
            if fused and lora.dora:
                with pytest.raises(UserError, match="PEFT has no DoRA of parameters"):
                    peft.write_peft(str(target), params, model, "mixtral", fused_experts=True)
                continue
            peft.write_peft(str(target), params, model, "mixtral", fused_experts=fused)
            config = json.loads((target / peft.CONFIG).read_text())
            assert config["lora_dropout"] == 0.0 and config["use_dora"] == lora.dora
            assert config.get("target_parameters") == (["gate.weight"] if fused else None)


def test_what_peft_does_not_have_is_refused(tmp_path):
    plain, base = base_of("mixtral")
    lora = Lora(rank=2, targets=("down",), dora=True)
    model = api.build(dataclasses.replace(plain.config, lora=lora))
    params = jax.jit(model.adapt)(base, jax.random.key(0))
    with pytest.raises(UserError, match="PEFT has no DoRA of parameters, .* use --format=peft"):
        peft.write_peft(str(tmp_path / "fused"), params, model, "mixtral", fused_experts=True)
    peft.write_peft(str(tmp_path / "single"), params, model, "mixtral")
    read, adapters = peft.read_peft(str(tmp_path / "single"), plain, "mixtral")
    jax.tree.map(np.testing.assert_array_equal, adapters, model.trained(params))
    folder = folder_of("mixtral_fused", tmp_path, {"target_parameters": ["q_proj.scale"]})
    with pytest.raises(UserError, match=r"target_parameters = \['q_proj.scale'\], which are not supported"):
        peft.read_peft(folder, plain, "mixtral")
    values = safetensors.load_file(tmp_path / peft.WEIGHTS)
    values[LAYER + "mlp.experts.lora_A.weight"] = np.zeros((15, 48), np.float32)
    folder_of("mixtral_fused", tmp_path)
    safetensors.save_file(values, tmp_path / peft.WEIGHTS)
    with pytest.raises(UserError, match=r"has the shape \[15, 48\], must be \[16, 48\]"):
        peft.read_peft(folder, plain, "mixtral")
