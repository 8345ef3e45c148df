"""Every tensor of a file is used, equals what stands for it, or is named; none is NaN or infinite.

The right values: transformers 5.24 ties two tensors that are both in a checkpoint only if they are equal, and keeps both
otherwise, whatever tie_word_embeddings says; T5 also scales a head that is tied.
"""

import dataclasses
import json
import logging
import os
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from capibara.core.types import UserError
from capibara.interop import conversion, open_model
from capibara.interop.gguf import write as gguf_write
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.interop.hf import tables, torch_file
from capibara.interop.quantize.values import finite
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderConfig, EncoderDecoderConfig

SIZES = dict(vocab_size=96, embed_dim=32, mlp_dim=48, num_layers=2, num_heads=4, dtype="float32")
LLAMA = DecoderConfig(**SIZES, num_kv_heads=2, norm_eps=1e-5, head="separate")
GEMMA = dict(head="tied", head_dim=16, norm_scale="offset", activation="geglu", embedding_scale="sqrt_dim")
T5 = EncoderDecoderConfig(**SIZES, num_encoder_layers=3, head_dim=16, relative_buckets=8, relative_distance=20)
GPT2 = dict(
    norm="layer", bias="all", activation="gelu", positions="learned", max_length=64, head="tied", num_kv_heads=None
)
FAMILIES = {
    "llama": LLAMA,
    "smollm2": dataclasses.replace(LLAMA, head="tied"),
    "qwen2": dataclasses.replace(LLAMA, bias="qkv", head="tied"),
    "gemma": dataclasses.replace(LLAMA, **GEMMA),
    "gemma2": dataclasses.replace(
        LLAMA, **GEMMA, norm_placement="sandwich", layer_pattern=("local", "global"), window=8
    ),
    "gpt2": dataclasses.replace(LLAMA, **GPT2),
    "t5": dataclasses.replace(T5, activation="relu", head="tied"),
    "t5_1_1": T5,
    "bert": EncoderConfig(**SIZES, max_length=40),
}
TIED = [name for name, config in FAMILIES.items() if config.head == "tied"]
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def model_of(family, path):
    """A model with random weights, and its folder."""
    model, rng = api.build(FAMILIES[family]), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), model.abstract_params)
    values = hf_config.to_hf(model.config, {"model_type": family} if family in tables.NAMES else None)
    shapes = open_model.hf_shapes(model, values["model_type"])
    tensors = open_model.hf_tensors(params, model, values["model_type"])
    hf_folder.save_hf(str(path), values, shapes, tensors, {}, dtype="float32")
    return model, str(path)


def rewrite(folder, change):
    """Changes the tensors of a folder."""
    path = pathlib.Path(folder) / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def loaded(folder):
    foreign = open_model.open_model(folder)
    model = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    here = SingleDeviceSharding(jax.devices()[0])
    return foreign, model, open_model.load_params(foreign, model, jax.tree.map(lambda _: here, model.abstract_params))


@pytest.mark.parametrize("family", TIED)
def test_a_stored_head_is_the_embedding_or_is_not_tied(family, tmp_path):
    model, folder = model_of(family, tmp_path / family)
    model_type = json.loads((tmp_path / family / "config.json").read_text())["model_type"]
    head, embedding = tables.ends(model_type)
    rewrite(folder, lambda tensors: tensors.update({head: tensors[embedding].copy()}))
    assert hf_config.from_hf(loaded(folder)[0].config).head == "tied"
    rewrite(folder, lambda tensors: tensors.update({head: tensors[embedding] + 1}))
    if model_type == "t5":
        with pytest.raises(
            UserError, match=r"lm_head.weight differs from shared.weight, and config.json has tie_word_"
        ):
            open_model.open_model(folder)
        return
    foreign, model, params = loaded(folder)
    assert model.config.head == "separate"
    np.testing.assert_array_equal(params["output"], foreign.read(embedding) + 1)


@pytest.mark.parametrize("family", ["t5", "t5_1_1", "bert"])
def test_a_tensor_that_stands_for_another_has_its_values(family, tmp_path):
    _, folder = model_of(family, tmp_path / family)
    model_type = "bert" if family == "bert" else "t5"
    for alias, target in tables.fixed_aliases(model_type).items():
        rewrite(folder, lambda tensors: tensors.update({alias: tensors[target].copy()}))  # noqa: B023
        loaded(folder)
        rewrite(folder, lambda tensors: tensors.update({alias: tensors[target] * 2}))  # noqa: B023
        with pytest.raises(
            UserError, match=f"{alias} differs from {target}, and capibara's {model_type} has one for both"
        ):
            open_model.open_model(folder)
        rewrite(folder, lambda tensors: tensors.pop(alias))  # noqa: B023


def test_a_gguf_file_of_a_tied_family_has_no_other_head(tmp_path):
    import gguf

    foreign = open_model.open_model(model_of("gemma2", tmp_path / "gemma2")[1])
    tensors = {name: foreign.read(name) for name in foreign.shapes()}
    path = str(tmp_path / "model.gguf")
    gguf_write.write_gguf(path, foreign.config, tensors.items(), {}, {}, dtype="f32")
    reader = gguf.GGUFReader(path)
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight").data
    for factor in (1, 2):
        other = str(tmp_path / f"{factor}.gguf")
        with_tensor(reader, other, "output.weight", np.asarray(embedding) * factor)
        if factor == 1:
            assert hf_config.from_hf(open_model.open_model(other).config).head == "tied"
            continue
        with pytest.raises(UserError, match=r"output.weight differs from token_embd.weight, and the head of gemma2"):
            open_model.open_model(other)


def with_tensor(reader, path, name, value):
    """A copy of a GGUF file with one more tensor."""
    import gguf

    writer = gguf.GGUFWriter(path, "gemma2")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.asarray(tensor.data))
    writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(dtype, bad, tmp_path):
    for at in ((0, 0), (-1, -1)):
        value = np.ones((1100, 257), np.float32).astype(DTYPES[dtype])
        assert finite.check("x", value) is value
        value[at] = bad
        kind = "1 NaN and 0" if np.isnan(bad) else "0 NaN and 1"
        with pytest.raises(
            UserError, match=f"^layer.weight has values that are not finite, {kind} infinite of 282,700: copy"
        ):
            finite.check("layer.weight", value)
    value = np.array([ml_dtypes.finfo(DTYPES[dtype]).max, ml_dtypes.finfo(DTYPES[dtype]).tiny, 0, -1], DTYPES[dtype])
    assert finite.check("x", value) is value
    assert finite.check("x", np.array([7, 0], np.int32)).dtype == np.int32


def test_every_reader_of_weights_names_those_that_are_not_finite(tmp_path):
    """Loading, converting in both directions, and merging."""
    _, folder = model_of("llama", tmp_path / "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors[name].__setitem__((3, 4), np.nan))
    bad = tmp_path / "state_dict"
    bad.mkdir()
    (bad / "config.json").write_bytes((tmp_path / "llama" / "config.json").read_bytes())
    torch_file.save_torch(str(bad / "pytorch_model.bin"), load_file(os.path.join(folder, "model.safetensors")), {})
    for path in (folder, str(bad)):
        with pytest.raises(UserError, match=f"{name} has values that are not finite, 1 NaN and 0 infinite"):
            loaded(path)
        foreign = open_model.open_model(path)
        model = api.build(hf_config.from_hf(foreign.config))
        with pytest.raises(UserError, match=f"{name} has values that are not finite, 1 NaN"):
            list(open_model.foreign_tensors(foreign, model, "llama"))


def test_what_of_a_folder_is_not_read_is_said(tmp_path, caplog):
    _, folder = model_of("bert", tmp_path / "bert")
    pooler = {
        "bert.pooler.dense.weight": np.zeros((32, 32), np.float32),
        "bert.pooler.dense.bias": np.zeros(32, np.float32),
    }
    rewrite(folder, lambda tensors: tensors.update(pooler))
    config = json.loads((tmp_path / "bert" / "config.json").read_text())
    neutral = {"use_cache": True, "rope_interleaved": False, "torch_dtype": "float32", "hidden_dropout_prob": 0.1}
    (tmp_path / "bert" / "config.json").write_text(
        json.dumps(config | neutral | {"use_qk_norm": True, "logit_scale": 2.0})
    )
    with caplog.at_level(logging.WARNING):
        open_model.open_model(folder)
    keys, parts = (record.getMessage() for record in caplog.records)
    assert keys.endswith("config.json has use_qk_norm = True, logit_scale = 2.0, which bert models do not read")
    assert "2 tensors of other parts than the language model are not read, bert.pooler.dense.bias the first" in parts


@pytest.mark.parametrize("form", [form for form in conversion.FORMATS if not form.startswith("gguf")])
@pytest.mark.parametrize("ending", [".onnx", ".PT", ".safetensors", ".bin", ".h5"])
def test_a_folder_is_not_written_under_the_name_of_a_file(form, ending, tmp_path):
    with pytest.raises(
        UserError, match=f"must not end in {ending.lower()}: it is a folder, try --to={tmp_path}/model$"
    ):
        conversion.check_target(f"{tmp_path}/model{ending}", form, None)
    conversion.check_target(f"{tmp_path}/llama-3.1", form, None)


def split(folder, index_of=lambda where: where, more=None):
    """Splits a folder's tensors into two files with an index."""
    path = pathlib.Path(folder)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-1-of-2.safetensors": names[:5], "model-2-of-2.safetensors": names[5:]}
    for file, own in files.items():
        save_file(
            {name: tensors[name] for name in own} | (more or {}).get(file, {}), path / file, metadata={"format": "pt"}
        )
    where = {name: file for file, own in files.items() for name in own}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index_of(where)}))
    return tensors


def test_tensors_that_an_index_does_not_name_are_read(tmp_path):
    # transformers 5.24.0 reads every tensor of the files that an index names.
    _, folder = model_of("llama", tmp_path / "model")
    tensors = split(folder, lambda where: {name: file for name, file in where.items() if name != "model.norm.weight"})
    foreign, _, _ = loaded(folder)
    assert np.array_equal(foreign.read("model.norm.weight"), tensors["model.norm.weight"])


def test_a_tensor_that_an_index_does_not_name_and_no_model_has_is_named(tmp_path):
    _, folder = model_of("llama", tmp_path / "model")
    split(folder, more={"model-2-of-2.safetensors": {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}})
    with pytest.raises(
        UserError, match=r"^model.layers.0.self_attn.q_proj.bias is in the checkpoint, not in the model"
    ):
        loaded(folder)


@pytest.mark.parametrize("factor", [1, 7])
def test_a_tensor_in_two_files_is_one_tensor(factor, tmp_path):
    _, folder = model_of("llama", tmp_path / "model")
    norm = load_file(f"{folder}/model.safetensors")["model.norm.weight"]
    split(folder, more={"model-1-of-2.safetensors": {"model.norm.weight": norm * factor}})
    if factor == 1:
        assert np.array_equal(loaded(folder)[0].read("model.norm.weight"), norm)
        return
    with pytest.raises(
        UserError, match=r"model.norm.weight differs in model-2-of-2.safetensors and model-1-of-2"
    ) as error:
        open_model.open_model(folder)
    assert "\n" not in str(error.value)


def test_one_file_comes_before_an_index_beside_it(tmp_path, caplog):
    # As in transformers 5.24.0.
    _, folder = model_of("llama", tmp_path / "model")
    whole = pathlib.Path(folder, "model.safetensors").read_bytes()
    split(folder)
    pathlib.Path(folder, "model.safetensors").write_bytes(whole)
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"] * 11}))
    foreign, _, _ = loaded(folder)
    assert np.array_equal(
        foreign.read("model.norm.weight"), load_file(f"{folder}/model.safetensors")["model.norm.weight"]
    )
    assert (
        "model.safetensors is read, as by transformers, and not the files of model.safetensors.index.json"
        in caplog.text
    )
