"""gpt-oss's own layouts: MXFP4 in folders of transformers and in GGUF files, and interleaved experts."""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

from capibara.cli import convert
from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.quantize.formats import mxfp4
from capibara.models import api
from capibara.multihost import exits

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import test_folders  # noqa: E402
import test_peft_training  # noqa: E402
from test_folders import FOLDERS, Drawn  # noqa: E402

# The values of the 16 codes of FP4 (E2M1).
CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
CODES += [-x for x in CODES]


def run(*argv):
    return exits.run_verb(convert.main, [str(arg) for arg in argv])


def by_hand(blocks, scales):
    """Decodes one number at a time."""
    found = []
    for byte in blocks:
        found += [CODES[byte & 15], CODES[byte >> 4]]
    return np.array(found) * 2.0 ** (int(scales) - 127)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A gpt-oss as transformers writes it, with experts whose values MXFP4 represents exactly."""
    path, drawn = tmp_path_factory.mktemp("gpt_oss") / "plain", Drawn("gpt_oss")
    path.mkdir()
    values = {name: drawn.read(name) for name in drawn.shapes()}
    for name, value in values.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            values[name] = np.stack([mxfp4.values(*mxfp4.packed(name, one.T)).T for one in value])
    of_llama_cpp = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rope_parameters": {"rope_type": "default"}}
    safetensors.save_file({name: np.ascontiguousarray(x) for name, x in values.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(FOLDERS["gpt_oss"]["config"] | of_llama_cpp))
    return path


def read(path):
    foreign = open_model.open_model(str(path))
    return {name: foreign.read(name) for name in foreign.shapes()}


def test_numbers_are_those_of_the_format():
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (3, 2, 16), np.uint8), rng.integers(100, 140, (3, 2), np.uint8)
    got = mxfp4.values(blocks, scales)
    assert got.dtype == np.float32 and got.shape == (3, 64)
    for row in range(3):
        want = np.concatenate([by_hand(blocks[row, block], scales[row, block]) for block in range(2)])
        np.testing.assert_array_equal(got[row], want)
    # Values of the format come back unchanged, at any scale.
    np.testing.assert_array_equal(mxfp4.values(*mxfp4.packed("w", got)), got)


def test_rounding_is_to_the_nearest_and_ties_to_the_even_code():
    row = np.zeros(32, np.float32)
    row[:12] = [4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.26, -1.7, 0.24, 7.9]
    blocks, scales = mxfp4.packed("w", row)
    assert scales.tolist() == [127]
    want = [4, 0, 1, 1, 2, 2, 4, 4, -0.5, -1.5, 0, 6]
    assert mxfp4.values(blocks, scales)[:12].tolist() == want
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)
    theirs = gguf.dequantize(gguf.quantize(values, gguf.GGMLQuantizationType.MXFP4), gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(mxfp4.values(*mxfp4.packed("w", values)), theirs)


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match="w has values that are not finite"):
        mxfp4.packed("w", np.array([np.nan] * 32))


def test_folders_in_mxfp4_are_written_and_read(folder, tmp_path):
    assert run("--from", folder, "--to", tmp_path / "packed", "--dtype", "mxfp4") == 0
    stored = safetensors.load_file(tmp_path / "packed" / "model.safetensors")
    blocks = stored["model.layers.1.mlp.experts.gate_up_proj_blocks"]
    assert blocks.shape == (8, 128, 1, 16) and blocks.dtype == np.uint8
    assert stored["model.layers.1.mlp.experts.down_proj_scales"].shape == (8, 32, 2)
    assert "model.layers.1.mlp.experts.down_proj" not in stored
    about = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert about["quantization_config"]["quant_method"] == "mxfp4" and about["dtype"] == "bfloat16"
    plain, got = read(folder), read(tmp_path / "packed")
    assert got.keys() == plain.keys()
    for name, value in plain.items():
        exact = ".mlp.experts." in name and not name.endswith("bias")
        np.testing.assert_allclose(got[name].astype(np.float32), value, rtol=0 if exact else 2**-8)
    # Written again as bfloat16, without loss.
    assert run("--from", tmp_path / "packed", "--to", tmp_path / "again") == 0
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "quantization_config" not in again and again["dtype"] == "bfloat16"
    for name, value in read(tmp_path / "again").items():
        np.testing.assert_array_equal(value, got[name])


def test_gguf_files_have_experts_in_mxfp4(folder, tmp_path):
    gguf = pytest.importorskip("gguf")
    assert run("--from", folder, "--to", tmp_path / "model.gguf", "--dtype", "mxfp4") == 0
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    kinds = {name: tensor.tensor_type.name for name, tensor in stored.items()}
    assert kinds["blk.1.ffn_gate_exps.weight"] == kinds["blk.1.ffn_down_exps.weight"] == "MXFP4"
    assert kinds["blk.0.attn_q.weight"] == "BF16" and kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    assert kinds["blk.0.attn_sinks.weight"] == kinds["blk.0.ffn_up_exps.bias"] == "F32"
    plain = read(folder)
    both = plain["model.layers.1.mlp.experts.gate_up_proj"]
    for name, part in (("gate", both[..., 0::2]), ("up", both[..., 1::2])):
        tensor = stored[f"blk.1.ffn_{name}_exps.weight"]
        got = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(got, np.swapaxes(part, 1, 2))
    for name, value in read(tmp_path / "model.gguf").items():
        exact = ".mlp.experts." in name and not name.endswith("bias")
        np.testing.assert_allclose(value.astype(np.float32), plain[name], rtol=0 if exact else 2**-8)


def test_what_mxfp4_is_not_for_is_refused(folder, tmp_path, capsys):
    assert run("--from", folder, "--to", tmp_path / "x", "--dtype", "mxfp4", "--format", "pytorch") == 2
    assert "--dtype=mxfp4" in capsys.readouterr().err
    corrupted = tmp_path / "corrupted"
    assert run("--from", folder, "--to", corrupted, "--dtype", "mxfp4") == 0
    stored = safetensors.load_file(corrupted / "model.safetensors")
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    safetensors.save_file(stored, corrupted / "model.safetensors")
    with pytest.raises(UserError, match="down_proj_scales is missing in the checkpoint"):
        open_model.open_model(str(corrupted))


@pytest.mark.standard_promotion
@pytest.mark.heavy
def test_five_steps_of_all_its_parameters_are_those_of_transformers():
    """training.json has transformers' losses and how far it moved each tensor, including sinks and biases."""
    recorded = test_peft_training.RECORDED["gpt_oss"]
    model, params = test_folders.loaded("gpt_oss")
    before = dict(open_model.hf_tensors(jax.tree.map(np.asarray, params), model, "gpt_oss"))
    assert {name: list(value.shape) for name, value in before.items()} == recorded["tensors"]
    before = {name: value.copy() for name, value in before.items()}
    losses, norm, params = test_peft_training.learned(without_balance(model), params, len(recorded["losses"]))
    np.testing.assert_allclose(norm, recorded["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(losses, recorded["losses"], rtol=0, atol=5e-6)
    after = dict(open_model.hf_tensors(params, model, "gpt_oss"))
    moved = {name: float(np.linalg.norm(after[name] - value)) for name, value in before.items()}
    assert moved == pytest.approx(recorded["moved"], rel=2e-3)


def without_balance(model):
    """transformers adds a balance loss only if it is configured."""
    moe = dataclasses.replace(model.config.moe, balance_loss=0.0)
    return api.build(dataclasses.replace(model.config, moe=moe))
