"""Tables of experts by token ids, in folders: whole numbers, which no dtype rounds and no merge adds."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.models import api
from capibara.models.api import DeepseekV4Config, Indexer, Moe, Rope

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "merge"))
from llamas import run, tokenizer  # noqa: E402

TABLE = "model.layers.0.ffn.gate.tid2eid"
CONFIG = DeepseekV4Config(
    vocab_size=400,
    embed_dim=4,
    num_layers=2,
    num_heads=2,
    head_dim=4,
    mlp_dim=2,
    dtype="float32",
    layer_pattern=("local",),
    window=4,
    indexer=Indexer(head_dim=4, pairs="adjacent"),
    query_rank=4,
    out_groups=1,
    out_rank=2,
    streams=2,
    rope=Rope(pairs="adjacent", fraction=0.5),
    moe=Moe(num_experts=8, top_k=2, hash_layers=1, score="sqrt_softplus", correction="expert", shared_experts=1),
)


def table(shift=0, experts=8):
    return (np.arange(800).reshape(400, 2) + shift) % experts


def write(folder, seed=0, shift=0, config=CONFIG):
    values, draw = hf_config.to_hf(config) | {"eos_token_id": 0}, np.random.default_rng(seed)
    shapes = open_model.hf_shapes(api.build(config), values["model_type"])
    tensors = [(name, draw.standard_normal(shape, np.float32)) for name, shape in shapes.items()]
    tensors = [(name, table(shift, config.moe.num_experts) if name == TABLE else value) for name, value in tensors]
    hf_folder.save_hf(str(folder), values, shapes, tensors, tokenizer(), dtype="float32")


def changed(folder, value):
    file = folder / "model.safetensors"
    save_file(load_file(file) | {TABLE: value}, file, metadata={"format": "pt"})


def read(folder, dtype=None):
    foreign = open_model.open_model(str(folder))
    model = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    here = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), model.abstract_params)
    return open_model.load_params(foreign, model, here, dtype=dtype)["layers"]["hash_mlp"]


def test_no_dtype_rounds_a_table(tmp_path):
    moe = dataclasses.replace(CONFIG.moe, num_experts=300)  # bfloat16 has no 257
    write(tmp_path / "a", config=dataclasses.replace(CONFIG, num_layers=1, moe=moe))
    for dtype in (None, jnp.bfloat16, jnp.float16):
        layer = read(tmp_path / "a", dtype)
        assert layer["router"].dtype == (dtype or jnp.float32)
        np.testing.assert_array_equal(layer["expert_table"][0], table(experts=300))


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.uint16])
def test_a_table_is_of_any_whole_numbers(kind, tmp_path):
    write(tmp_path / "a")
    changed(tmp_path / "a", table().astype(kind))
    np.testing.assert_array_equal(read(tmp_path / "a")["expert_table"][0], table())


@pytest.mark.parametrize("key", ["n_routed_experts", "num_local_experts"])
@pytest.mark.parametrize("value", [table() + 1, table() - 1, np.float32(table())], ids=["large", "negative", "floats"])
def test_other_tables_are_refused(value, key, tmp_path):
    write(tmp_path / "a")
    changed(tmp_path / "a", value)
    file = tmp_path / "a" / "config.json"
    file.write_text(file.read_text().replace("n_routed_experts", key))
    message = f"{TABLE} is stored as .*, must be whole numbers from 0 to below n_routed_experts = 8"
    with pytest.raises(UserError, match=message):
        read(tmp_path / "a")


def test_merged_models_keep_the_table_that_all_have(tmp_path, capsys):
    for seed, name in enumerate("abc"):
        write(tmp_path / name, seed, shift=seed // 2)
    models = [tmp_path / "a", tmp_path / "b"]
    assert run(*models, "--method=linear", "--weights=0.3,0.7", f"--to={tmp_path}/sum") == 0
    noisy = ["--method=dare_ties", "--density=0.5", f"--base={tmp_path}/c"]
    assert run(*models, *noisy, f"--to={tmp_path}/ties") == 0
    for name in ("sum", "ties"):
        merged = load_file(tmp_path / name / "model.safetensors")[TABLE]
        assert merged.dtype == np.int64
        np.testing.assert_array_equal(merged, table())
    capsys.readouterr()
    assert run(tmp_path / "a", tmp_path / "c", "--method=linear", f"--to={tmp_path}/no") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert f"{TABLE} has whole numbers that differ between the models, must be the same in all" in line
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        (dict(first_kinds=("local",), layer_pattern=("compressed",), num_layers=2), ("local", "compressed")),
        (dict(first_kinds=("compressed",) * 2, layer_pattern=("compressed_sparse", "compressed"), num_layers=5), None),
        (dict(moe=dataclasses.replace(CONFIG.moe, hash_layers=7)), ("local",) * 2),
    ],
    ids=["short", "bootstrap", "tables"],
)
def test_a_folder_has_the_kinds_of_layers_however_they_are_written(fields, kinds):
    config = dataclasses.replace(CONFIG, **fields)
    again = hf_config.from_hf(hf_config.to_hf(config), dtype="float32")
    assert again.kinds == config.kinds == (kinds or config.kinds)
    assert again.moe.hash_layers == min(config.moe.hash_layers, config.num_layers)
