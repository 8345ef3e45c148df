"""Other programs read and pack folders in 4 bits; needs an environment with torch and these:

make test-peer PEER=quantized PEER_PYTHON=PATH/bin/python    (pip install torch transformers optimum onnx-ir onnxruntime-genai gptqmodel)
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE))
import gguf_cases as cases  # noqa: E402
from test_quantization import Source, asked, made_of  # noqa: E402

from capibara.interop import conversion  # noqa: E402

PYTHON = os.environ.get("QUANT_PYTHON")
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt_neox")
HOWS = {"gptq": {}, "awq": {}, "rtn": {"symmetric": False}}  # the last one uses GPTQ's second format
NAMES = [f"{family}-{method}" for family in FAMILIES for method in HOWS]

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="QUANT_PYTHON names no python with gptqmodel"),
    pytest.mark.heavy,
]


@dataclasses.dataclass(frozen=True)
class Case:
    """A folder: the weights that we chose, the stored tensors, and the other programs' results."""

    made: object
    stored: dict[str, np.ndarray]
    theirs: dict[str, np.ndarray]
    tokens: np.ndarray

    def logits(self):
        """Our model, with the folder's float16 tensors in float16."""
        half = jax.tree.map(lambda x: np.asarray(x, np.float16).astype(np.float32), self.made.float_params())
        tokens, positions = self.tokens, np.broadcast_to(np.arange(24, dtype=np.int32), (2, 24))
        batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "positions": positions}
        return np.asarray(self.made.model.logits(half, batch))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    text, found = folder / "text.txt", {}
    text.write_text(cases.TEXT[:6000], encoding="utf-8")
    tokens = np.random.default_rng(0).integers(2, 300, (2, 24), np.int32)
    for name in NAMES:
        family, method = name.split("-")
        source, how = Source(family), asked(method, str(text), **HOWS[method])
        source.config["pad_token_id"] = 0  # transformers' default for phi3 is larger than this vocabulary
        conversion.write(source, str(folder / name), "hf", None, lambda *given: None, how)
        made = found[name] = made_of(source, how, q4_0=False)
        parts = {"tokens": tokens}
        for tensor, packed in made.packed.items():
            of_one = {"values": packed.values(), "scales": packed.scales, "zeros": packed.zeros}
            parts |= {f"{tensor}:{part}": value for part, value in of_one.items()}
        np.savez(folder / f"{name}.made.npz", **parts)
    (folder / "names.json").write_text(json.dumps(NAMES))
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        [PYTHON, HERE / "quant_peer.py", folder], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout[-3000:]

    def of(name):
        stored = load_file(folder / name / "model.safetensors")
        return Case(found[name], stored, dict(np.load(folder / f"{name}.read.npz")), tokens)

    return of


@pytest.mark.parametrize("name", NAMES)
def test_gptqmodel_reads_every_weight_that_was_made(folders, name):
    case = folders(name)
    assert {key.partition(":")[0] for key in case.theirs if key.endswith(":values")} == set(case.made.packed)
    for tensor, packed in case.made.packed.items():
        np.testing.assert_array_equal(case.theirs[f"{tensor}:values"], packed.values().astype(np.float16), tensor)


@pytest.mark.parametrize("name", NAMES)
def test_gptqmodel_packs_the_same_words(folders, name):
    case = folders(name)
    for tensor in case.made.packed:
        stem = tensor.removesuffix("weight")
        names = [part for part in ("qweight", "qzeros", "scales", "g_idx") if stem + part in case.stored]
        assert len(names) == (3 if name.endswith("awq") else 4)
        for part in names:
            np.testing.assert_array_equal(case.theirs[f"{tensor}:{part}"], case.stored[stem + part], stem + part)
            assert case.theirs[f"{tensor}:{part}"].dtype == case.stored[stem + part].dtype


@pytest.mark.parametrize("name", NAMES)
def test_transformers_answers_as_the_model_that_was_made(folders, name):
    case = folders(name)
    want = case.logits()
    most = np.abs(want).max()
    np.testing.assert_allclose(case.theirs["exact"], want, rtol=0, atol=5e-5 * most)
    if name.endswith("awq"):  # its layers compute in float16
        assert np.mean(np.square(case.theirs["logits"] - want)) < 1e-2**2 * np.mean(np.square(want))
    else:
        np.testing.assert_allclose(case.theirs["logits"], want, rtol=0, atol=5e-5 * most)


@pytest.mark.parametrize("name", [f"{family}-{m}" for family in FAMILIES[:3] for m in ("gptq", "awq")])
def test_onnx_runtime_has_every_code_scale_and_zero(folders, name):
    case = folders(name)
    for tensor, packed in case.made.packed.items():
        np.testing.assert_array_equal(case.theirs[f"{tensor}:codes"], packed.codes)
        np.testing.assert_array_equal(case.theirs[f"{tensor}:ort_scales"], packed.scales)
        np.testing.assert_array_equal(case.theirs[f"{tensor}:ort_zeros"], packed.zeros)
