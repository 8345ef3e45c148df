"""`capibara convert --skip_layers --mlp_dims`: a smaller Gemma 3n from a folder or a run, and refused inputs."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import gguf_cases as cases  # noqa: E402

from capibara.cli import convert  # noqa: E402
from capibara.interop import open_model  # noqa: E402
from capibara.interop.hf import folder as hf_folder  # noqa: E402
from capibara.multihost import exits

SMALL = dict(num_hidden_layers=6, num_kv_shared_layers=3, intermediate_size=32, hidden_size_per_layer_input=8)
SMALL |= dict(activation_sparsity_pattern=[0.95] * 2 + [0.0] * 4)
SMALL |= dict(layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2)


def written(folder, name: str, **values) -> dict[str, np.ndarray]:
    """Writes the tiny model of a case as a folder; returns its tensors."""
    config = cases.CASES[name] | values
    found = dict(cases.tensors(config))
    shapes = {key: value.shape for key, value in found.items()}
    hf_folder.save_hf(str(folder), config, shapes, found.items(), cases.byte_level(), dtype="float32")
    return found


def run(*argv: str) -> int:
    return exits.run_verb(convert.main, argv)


def test_a_folder_becomes_a_smaller_one(tmp_path, capfd):
    whole = written(tmp_path / "whole", "gemma3n", **SMALL)
    flags = ("--skip_layers=3-4", "--mlp_dims=16,32,8,32")
    assert run(f"--from={tmp_path}/whole", f"--to={tmp_path}/part", *flags) == 0, capfd.readouterr().err
    found = open_model.open_model(str(tmp_path / "part"))
    assert found.config["num_hidden_layers"] == 4 and found.config["num_kv_shared_layers"] == 1
    assert found.config["intermediate_size"] == [16, 32, 8, 32]
    assert found.config["layer_types"] == ["sliding_attention"] * 2 + ["full_attention"] * 2
    table = whole["model.embed_tokens_per_layer.weight"].reshape(cases.VOCAB, 6, 8)
    np.testing.assert_array_equal(
        found.read("model.embed_tokens_per_layer.weight"), table[:, [0, 1, 2, 5]].reshape(cases.VOCAB, 32)
    )
    for name, ours in (("layers.3.self_attn.q_proj", "layers.5.self_attn.q_proj"), ("layers.2.mlp.down_proj",) * 2):
        want = whole[f"model.{ours}.weight"]
        got = found.read(f"model.{name}.weight")
        np.testing.assert_array_equal(got, want[:, :8] if "down" in name else want)
    assert (tmp_path / "part" / "tokenizer.json").read_bytes() == cases.byte_level()["tokenizer.json"]


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("llama", ("--mlp_dims=32",), "--skip_layers and --mlp_dims are of gemma3n_text, not of llama"),
        ("gemma3n", ("--skip_layers=2",), "skip_layers has 2, whose keys and values the last global layers read"),
        ("gemma3n", ("--skip_layers=x",), "--skip_layers has 'x', must be numbers and ranges: try 20-24"),
        ("gemma3n", ("--skip_layers=4-3",), "--skip_layers has '4-3', must be layers of the model, the first before"),
        ("gemma3n", ("--skip_layers=0-99999999999",), "--skip_layers has '0-99999999999', must be layers"),
        ("gemma3n", ("--skip_layers=3-",), "--skip_layers has '', must be numbers"),
        ("gemma3n", ("--skip_layers=",), "--skip_layers has '', must be numbers"),
        ("gemma3n", ("--mlp_dims=",), "--mlp_dims has '', must be numbers: try 8192"),
        ("gemma3n", ("--mlp_dims=8,",), "--mlp_dims has '', must be numbers: try 8192"),
        ("gemma3n", ("--mlp_dims=8", "--format=peft"), "are of whole models, not of adapters"),
    ],
)
def test_what_is_no_submodel_is_refused(name, flags, said, tmp_path, capfd):
    written(tmp_path / "whole", name, **(SMALL if name == "gemma3n" else {}))
    assert run(f"--from={tmp_path}/whole", f"--to={tmp_path}/part", *flags) == 2
    assert said in capfd.readouterr().err and not (tmp_path / "part").exists()
