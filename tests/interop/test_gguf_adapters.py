"""Adapters as GGUF files: added to the base's file they give the merged model, here and in llama.cpp."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import sys
import zlib

import gguf
import jax
import numpy as np
import pytest

sys.path += [
    str(pathlib.Path(__file__).resolve().parent),
    str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"),
]
import gguf_cases as cases  # noqa: E402

from capibara import config
from capibara.cli import convert
from capibara.core import tree
from capibara.core.types import UserError  # noqa: E402
from capibara.interop import gin_of, open_model
from capibara.interop.gguf import adapter as gguf_adapter
from capibara.interop.gguf.read import open_gguf  # noqa: E402
from capibara.interop.gguf.write import write_gguf  # noqa: E402
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.interop.peft import folder as peft  # noqa: E402
from capibara.models import api  # noqa: E402
from capibara.models.api import Lora  # noqa: E402
from capibara.multihost import exits
from capibara.training import run_folder  # noqa: E402

ALL = Lora(rank=2, alpha=6.0, targets=("all-linear",))
# Name -> a case and its adapters.
ADAPTERS = {
    "llama": ("llama", ALL),
    "patterns": ("llama", dataclasses.replace(ALL, rank_pattern=(("down", 3),), alpha_pattern=(("key", 1.5),))),
    "rslora": ("llama", Lora(rank=4, alpha=6.0, rslora=True, targets=("query", "value"))),
    "qwen3": ("qwen3", ALL),
    "gemma2": ("gemma2", ALL),
    "gemma3n": ("gemma3n", ALL),
    "phi3": ("phi3", ALL),
    "parts of a fused tensor": ("phi3", Lora(rank=2, alpha=6.0, targets=("query", "value", "up"), rslora=True)),
    "gpt2": ("gpt2", ALL),
    "gpt_neox": ("gpt_neox", ALL),
    "mixtral": ("mixtral", ALL),
    "gpt_oss": ("gpt_oss", dataclasses.replace(ALL, rank_pattern=(("up", 3),), alpha_pattern=(("down", 1.5),))),
    "gpt_oss, together": ("gpt_oss", dataclasses.replace(ALL, fused=(("gate", "up"),))),
}
_QUICK = ("llama", "patterns", "parts of a fused tensor", "gpt_neox", "mixtral", "gpt_oss")  # every rule, once


class Made:
    """A base, adapters of it, and the merged model, each as a GGUF file in `folder`."""

    def __init__(self, folder: pathlib.Path, name: str):
        case, lora = ADAPTERS[name]
        self.config = dict(cases.CASES[case])
        self.base, self.merged, self.adapter = (folder / f"{part}.gguf" for part in ("base", "merged", "adapter"))
        self._write(self.base, cases.tensors(self.config))
        self.plain = api.build(hf_config.from_hf(self.config, dtype="float32"))
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: here, self.plain.abstract_params)
        self.plain_params = params = open_model.load_params(open_gguf(self.base), self.plain, shardings)
        self.model = api.build(dataclasses.replace(self.plain.config, lora=lora))
        adapted = jax.jit(self.model.adapt)(params, jax.random.key(0))
        self.params = tree.map_with_names(lambda name, x: drawn(name, x.shape) if "_lora/" in name else x, adapted)
        self.model_type = self.config["model_type"]
        merged = jax.jit(self.model.merge)(self.params)
        self._write(self.merged, open_model.hf_tensors(merged, self.plain, self.model_type))
        pairs = peft.pairs(self.params, self.model, self.model_type)
        self.count = gguf_adapter.write_adapter(self.adapter, self.config, pairs)

    def _write(self, path, tensors):
        write_gguf(path, self.config, tensors, cases.byte_level(), dtype="f32")


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return 0.2 * np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)


def tensors(path) -> dict[str, np.ndarray]:
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


def values(path) -> dict[str, object]:
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def check_sum(base, adapter, merged) -> int:
    """Adds an adapter's file to its base's as llama.cpp does; returns how many tensors it changed."""
    base, merged, said, pairs = tensors(base), tensors(merged), values(adapter), tensors(adapter)
    assert said["general.type"] == "adapter" and said["adapter.type"] == "lora"
    changed = {name.removesuffix(".lora_a") for name in pairs if name.endswith(".lora_a")}
    assert len(pairs) == 2 * len(changed)
    for name, value in base.items():
        if name not in changed:
            np.testing.assert_array_equal(value, merged[name], err_msg=name)
            continue
        a, b = pairs[f"{name}.lora_a"], pairs[f"{name}.lora_b"]
        got = value + said["adapter.lora.alpha"] / b.shape[-1] * (b @ a)
        np.testing.assert_allclose(got, merged[name], rtol=0, atol=2e-6, err_msg=name)
        assert np.abs(got - value).max() > 0.05
    return len(changed)


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.heavy) for name in ADAPTERS]
)
def test_a_base_with_the_adapter_is_the_merged_model(name, tmp_path):
    made = Made(tmp_path, name)
    assert check_sum(made.base, made.adapter, made.merged) == made.count > 3
    assert values(made.adapter)["general.architecture"] == values(made.base)["general.architecture"]
    if name == "llama":
        assert values(made.adapter)["adapter.lora.alpha"] == 6.0
    if name == "mixtral":
        assert tensors(made.adapter)["blk.1.ffn_up_exps.weight.lora_a"].shape == (4, 2, 32)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ADAPTERS)
def test_llama_cpp_answers_with_the_adapter_as_the_merged_model(name, tmp_path):
    pytest.importorskip("xllamacpp")
    from gguf_files import LlamaCpp

    made, asked = Made(tmp_path, name), {"count": 16, "best": cases.VOCAB}
    asked["ids"] = [int(i) for i in np.random.default_rng(0).integers(2, 300, 12)]
    told = []
    for path, lora in ((made.merged, None), (made.base, made.adapter), (made.base, None)):
        with LlamaCpp(sys.executable, path, lora=lora) as peer:
            told.append(peer.ask("continue", **asked))
    merged, added, base = told
    assert added["ids"] == merged["ids"] != base["ids"]
    # Rounding can move an entry of its GELU table by a step, in each of Gemma 3n's 22 layers.
    tolerance = 2e-2 if name == "gemma3n" else 2e-3
    for want, got in zip(merged["best"], added["best"], strict=True):
        want, got = dict(want), dict(got)
        assert max(abs(got[token] - value) for token, value in want.items()) < tolerance


def run(*argv) -> int:
    config.reset()
    return exits.run_verb(convert.main, [str(arg) for arg in argv])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, a run with adapters of it, their PEFT folder, and runs with adapters that GGUF does not support."""
    folder = tmp_path_factory.mktemp("folders")
    made = Made(folder, "llama")
    values = hf_config.to_hf(made.plain.config, made.config, dtype="float32")
    weights = [*open_model.hf_tensors(made.plain_params, made.plain, "llama")]
    shapes = {name: value.shape for name, value in weights}
    hf_folder.save_hf(f"{folder}/base", values, shapes, weights, {}, dtype="float32")
    for name, more in (("run", {}), ("dora", {"dora": True}), ("saved", {"modules_to_save": ("output",)})):
        model = api.build(dataclasses.replace(made.plain.config, lora=dataclasses.replace(ALL, **more)))
        params = made.params if not more else jax.jit(model.adapt)(made.plain_params, jax.random.key(0))
        os.makedirs(folder / name)
        own = gin_of.run(model.config, f"{folder}/{name}", {}) + f'\nTrainer.init_from = "{folder}/base"\n'
        run_folder.save(f"{folder}/{name}", params, own.replace("Dataset.length = 1024", "Dataset.length = 64"))
    assert run(f"--from={folder}/run", f"--to={folder}/peft", "--format=peft") == 0
    return folder


def test_a_run_and_a_folder_of_peft_give_the_same_file(folders, tmp_path, capfd):
    for name in ("run", "peft"):
        assert run(f"--from={folders}/{name}", f"--to={tmp_path}/{name}.gguf", "--format=gguf_lora") == 0
        assert "adapters of llama for llama.cpp, of 14 tensors" in capfd.readouterr().out
    assert (tmp_path / "run.gguf").read_bytes() == (tmp_path / "peft.gguf").read_bytes()
    assert check_sum(folders / "base.gguf", tmp_path / "run.gguf", folders / "merged.gguf") == 14


@pytest.mark.parametrize(
    "argv, match",
    [
        (["--from=run", "--to=TO/x"], "--to=TO/x with --format=gguf_lora must end in .gguf"),
        (
            ["--from=run", "--to=TO/x.gguf", "--dtype=q8_0"],
            "--dtype=q8_0 is for hf, hf_token_classification, gguf, pytorch, t5x: an adapter is stored in f32",
        ),
        (
            ["--from=peft", "--to=TO/x.gguf", "--quantize=rtn"],
            "--quantize=rtn is for hf and gguf: adapters are stored in f32",
        ),
        (["--from=base", "--to=TO/x.gguf"], "gguf_lora is for a run with adapters, and --from=base is no run folder"),
        (["--from=dora", "--to=TO/x.gguf"], "Lora.dora has magnitudes, which is more than pairs of matrices"),
        (["--from=saved", "--to=TO/x.gguf"], "Lora.modules_to_save trains output in full, which is more than pairs"),
    ],
)
def test_mistakes_are_one_line(argv, match, folders, monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(folders)
    capfd.readouterr()
    assert run(*(arg.replace("TO", str(tmp_path)) for arg in argv), "--format=gguf_lora") == 2
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and re.search(match.replace("TO", str(tmp_path)), told), told
    assert not [*tmp_path.iterdir()]


def test_a_file_of_adapters_is_no_model(folders):
    with pytest.raises(
        UserError, match=r"adapter.gguf holds adapters, not a model: pass it to llama.cpp beside its base"
    ):
        open_gguf(folders / "adapter.gguf")


def test_a_tensor_that_the_base_lacks(tmp_path):
    pair = peft.Pair("model.layers.0.self_attn.q_proj.weight", np.ones((2, 32)), np.ones((32, 2)), 1.0)
    other = pair._replace(name="model.layers.9.self_attn.q_proj.weight")
    with pytest.raises(UserError, match="layers.9.self_attn.q_proj.weight has an adapter, and its base has no such"):
        gguf_adapter.write_adapter(tmp_path / "x.gguf", cases.CASES["llama"], [pair, other])
    assert not [*tmp_path.iterdir()]
