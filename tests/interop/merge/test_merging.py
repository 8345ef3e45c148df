"""capibara merge: models of every format into every format, streamed, with a report; mistakes are one line."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from capibara import config
from capibara.cli import convert
from capibara.consensus.merging import METHODS
from capibara.consensus.merging.method import draw_of
from capibara.models.api import EncoderDecoderConfig, Moe
from capibara.multihost import exits

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
from llamas import PYTHON, QUERY, assert_broken_is_named, assert_close, refused, run, tokenizer, weights, write  # noqa: E402


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders base, a, b; b as a .gguf file and as a run; an adapter of the base, and what it makes of it."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "a", "b")):
        write(folder / name, seed)
    for target in ("b.gguf", "run"):
        form = ["--format=capibara"] if target == "run" else []
        assert exits.run_verb(convert.main, [f"--from={folder}/b", f"--to={folder}/{target}", *form]) == 0
    draw = np.random.default_rng(5)
    (folder / "lora").mkdir()
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "lora" / "adapter_config.json").write_text(
        json.dumps(about | {"base_model_name_or_path": str(folder / "base")})
    )
    factors, merged = {}, load_file(folder / "base" / "model.safetensors")
    for layer in range(2):
        a, b = draw.standard_normal((2, 32), np.float32), draw.standard_normal((32, 2), np.float32)
        name = f"base_model.model.{QUERY.format(layer)}"
        factors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        merged[f"{QUERY.format(layer)}.weight"] += 2 * (b @ a)
    save_file(factors, folder / "lora" / "adapter_model.safetensors")
    save_file(merged, folder / "lora_merged.safetensors")
    config.reset()
    return folder


def expected(method, files, base=None, seed=0):
    given, of_base = [load_file(file) for file in files], None if base is None else load_file(base)
    return {
        name: method.merge(
            [one[name] for one in given], None if of_base is None else of_base[name], draw_of(seed, name)
        )
        for name in given[0]
    }


def test_folders_are_merged_and_the_report_says_how(models, tmp_path, capsys):
    argv = [models / "a", models / "b", "--method=ties", f"--base={models}/base", f"--to={tmp_path}/out"]
    assert run(*argv, "--weights=1,0.5", "--gin.Ties.density=(0.3, 0.6)") == 0
    assert "llama, 21 tensors in f32; ties of 2 models" in capsys.readouterr().out
    method = METHODS["ties"](weights=(1.0, 0.5), density=(0.3, 0.6))
    files = [models / name / "model.safetensors" for name in ("a", "b")]
    assert_close(weights(tmp_path / "out"), expected(method, files, models / "base" / "model.safetensors"), 0)
    report = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert report["method"] == "ties" and report["base"]["path"] == f"{models}/base"
    settings = {"weights": [1, 0.5], "scale": 1, "normalize": True, "density": [0.3, 0.6], "floors": "none"}
    assert report["settings"] == settings
    assert len({one["weights_hash"] for one in [*report["models"], report["base"]]}) == 3
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model:\n- a\n- b\n- base\n" in card and "ties" in card
    assert sorted(os.listdir(tmp_path)) == ["out"]  # no temporary folder is left


def test_masks_are_those_of_the_seed(models, tmp_path):
    argv = [models / "a", models / "b", "--method=dare_linear", f"--base={models}/base", "--density=0.4"]
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        assert run(*argv, f"--to={tmp_path}/{name}", f"--seed={seed}") == 0
    one, again, other = (weights(tmp_path / name) for name in ("one", "again", "other"))
    assert all(np.array_equal(one[name], again[name]) for name in one)
    assert not any(np.array_equal(one[name], other[name]) for name in one)


def test_every_format_in(models, tmp_path):
    """A .gguf file and a run merge like the folder that they were made of, an adapter like the model that it makes."""
    b, lora = models / "b" / "model.safetensors", models / "lora_merged.safetensors"
    for name, file in (("b.gguf", b), ("run", b), ("lora", lora)):
        assert (
            run(models / "a", models / name, "--method=slerp", "--t=0.25", "--dtype=f32", f"--to={tmp_path}/{name}.out")
            == 0
        )
        want = expected(METHODS["slerp"](t=0.25), [models / "a" / "model.safetensors", file])
        assert_close(weights(tmp_path / f"{name}.out"), want)
    hashes = {
        json.loads((tmp_path / f"{name}.out" / "merge.json").read_text())["models"][1]["weights_hash"]
        for name in ("b.gguf", "run")
    }
    assert len(hashes) == 1  # of the tensors, not of a file


def test_every_format_out(models, tmp_path):
    argv = [models / "a", models / "b", "--method=linear", "--weights=3,1"]
    want = expected(METHODS["linear"](weights=(3.0, 1.0)), [models / name / "model.safetensors" for name in "ab"])
    for target, form in (("x.gguf", "gguf"), ("run", "capibara"), ("torch", "pytorch")):
        assert run(*argv, f"--to={tmp_path}/{target}", f"--format={form}") == 0
        report = tmp_path / ("x.merge.json" if form == "gguf" else f"{target}/merge.json")
        assert json.loads(report.read_text())["settings"]["weights"] == [3, 1]
        assert (
            exits.run_verb(convert.main, [f"--from={tmp_path}/{target}", f"--to={tmp_path}/{target}.hf", "--dtype=f32"])
            == 0
        )
        assert_close(weights(tmp_path / f"{target}.hf"), want)
    assert exits.run_verb(convert.main, ["verify", f"{tmp_path}/run"]) == 0


def test_encoder_decoders_are_merged_into_a_checkpoint_of_t5x(tmp_path):
    of = EncoderDecoderConfig(vocab_size=258, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=24, head="separate")
    for seed, name in ((1, "one"), (2, "two")):
        write(tmp_path / name, seed, of=of)
    given = [tmp_path / "one", tmp_path / "two"]
    assert run(*given, "--method=nuslerp", "--format=t5x", f"--to={tmp_path}/t5x") == 0
    assert run(tmp_path / "t5x", "--method=passthrough", f"--to={tmp_path}/out") == 0
    assert_close(
        weights(tmp_path / "out"), expected(METHODS["nuslerp"](), [one / "model.safetensors" for one in given])
    )


def test_the_dtype_is_that_of_the_models(tmp_path):
    for seed, name in ((1, "one"), (2, "two")):
        write(tmp_path / name, seed, dtype="bfloat16", num_layers=1)
    assert run(tmp_path / "one", tmp_path / "two", "--method=linear", f"--to={tmp_path}/out") == 0
    assert {str(value.dtype) for value in weights(tmp_path / "out").values()} == {"bfloat16"}


def test_experts_of_a_layer_are_merged_one_by_one(tmp_path):
    for seed, name in ((1, "one"), (2, "two")):
        write(tmp_path / name, seed, num_layers=1, moe=Moe(num_experts=4), head="separate")
    assert run(tmp_path / "one", tmp_path / "two", "--method=karcher", f"--to={tmp_path}/out") == 0
    files = [tmp_path / name / "model.safetensors" for name in ("one", "two")]
    assert_close(weights(tmp_path / "out"), expected(METHODS["karcher"](), files), 0)


def test_mistakes_are_one_line_and_leave_nothing(models, tmp_path, capfd):
    write(tmp_path / "wide", 1, mlp_dim=64)
    write(tmp_path / "deep", 1, num_layers=3)
    write(tmp_path / "other", 1, files=tokenizer("<end>"))
    before = sorted(os.listdir(tmp_path))
    a, b, to, linear = models / "a", models / "b", f"--to={tmp_path}/out", "--method=linear"
    assert "merge needs models and --to" in refused(capfd, a, b, linear)
    assert "--method=tise is unknown: did you mean ties" in refused(capfd, a, b, to, "--method=tise")
    assert "--density=0.5 is not a setting of linear, but of ties" in refused(capfd, a, b, to, linear, "--density=0.5")
    assert "--weights=1,x must be numbers" in refused(capfd, a, b, to, linear, "--weights=1,x")
    assert "weights has nan, must be finite" in refused(capfd, a, b, to, linear, "--weights=nan,1")
    assert "density is 0.0, must be greater than 0" in refused(capfd, a, b, to, "--method=ties", "--density=0")
    assert "weights has 3 numbers, must have one for each of the 2" in refused(
        capfd, a, b, to, linear, "--weights=1,2,3"
    )
    assert "ties needs the base model" in refused(capfd, a, b, to, "--method=ties")
    assert f"--to={a} exists already" in refused(capfd, a, b, f"--to={a}", linear)
    assert f"mlp_dim of {tmp_path}/wide is 64, must be 48 as of {a}" in refused(capfd, a, tmp_path / "wide", to, linear)
    assert f"num_layers of {tmp_path}/deep is 3, must be 2" in refused(capfd, a, tmp_path / "deep", to, linear)
    assert "another tokenizer" in (err := refused(capfd, a, tmp_path / "other", to, linear)) and "'<end>'" in err
    assert "--tokenizer=c is none of the models" in refused(capfd, a, b, to, linear, "--tokenizer=c")
    assert f"{tmp_path}/none does not exist" in refused(capfd, a, tmp_path / "none", to, linear)
    assert "Linear has no parameter" in refused(capfd, a, b, to, linear, "--gin.Linear.wieghts=(1.0, 2.0)")
    assert sorted(os.listdir(tmp_path)) == before
    assert run(a, tmp_path / "other", to, linear, f"--tokenizer={a}") == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer()["tokenizer.json"]


def test_a_model_with_values_that_are_not_finite_is_named(models, tmp_path, capfd):
    assert_broken_is_named(capfd, models, tmp_path, "--method=linear", "model.norm.weight", np.nan)


@pytest.mark.heavy
@pytest.mark.skipif(not PYTHON, reason="MERGEKIT_PYTHON names no python with mergekit")
@pytest.mark.parametrize("method", ["linear", "slerp", "ties", "karcher", "model_stock", "sce", "breadcrumbs"])
def test_folders_are_merged_as_by_mergekit(models, tmp_path, method):
    cls = METHODS[method]
    has_base = cls.base == "required"
    settings = {"density": 0.5, "gamma": 0.01} if "density" in cls.__dataclass_fields__ else {}
    settings |= {"select_topk": 0.5} if method == "sce" else {}
    about = {
        "merge_method": method, "dtype": "float32", "parameters": {"t": 0.5, **settings},
        "models": [{"model": f"{models}/{name}", "parameters": {"weight": 1.0}} for name in "ab"],
    }  # fmt: skip
    about |= {"base_model": f"{models}/{'base' if has_base else 'a'}"} if has_base or method == "slerp" else {}
    (tmp_path / "config.yaml").write_text(json.dumps(about))
    script = pathlib.Path(PYTHON).parent / "mergekit-yaml"
    subprocess.run([PYTHON, str(script), f"{tmp_path}/config.yaml", f"{tmp_path}/theirs"], check=True)
    ours = [models / "a", models / "b", f"--method={method}", f"--to={tmp_path}/ours"]
    ours += [f"--base={models}/base"] if has_base else []
    ours += [f"--gin.{cls.__name__}.floors='mergekit'"] if "floors" in cls.__dataclass_fields__ else []
    assert run(*ours, *(["--density=0.5"] if settings else [])) == 0
    assert_close(weights(tmp_path / "ours"), weights(tmp_path / "theirs"), 1e-5)
