"""Models that are corrupted, incomplete or no model: convert, and a run that begins from one, report it in one line."""

import dataclasses
import json
import os
import re
import shutil
import struct
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from capibara import config
from capibara.cli import convert
from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.multihost import exits

LLAMA = DecoderConfig(
    **dict(vocab_size=96, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=64, norm_eps=1e-5),
    head="separate",
    dtype="float32",
)
MODEL = api.build(LLAMA)
QUERY = "model.layers.0.self_attn.q_proj.weight"


def run(*argv):
    config.reset()
    return exits.run_verb(convert.main, [str(arg) for arg in argv])


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A model in one file, one in several shards, and a GGUF file."""
    folder = tmp_path_factory.mktemp("good")
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), MODEL.abstract_params)
    tensors = dict(open_model.hf_tensors(params, MODEL, "llama"))
    shapes, values = open_model.hf_shapes(MODEL, "llama"), hf_config.to_hf(LLAMA, {"max_position_embeddings": 64})
    for name, size in (("one", 10**9), ("several", 20_000)):
        hf_folder.save_hf(str(folder / name), values, shapes, tensors.items(), {}, dtype="float32", shard_bytes=size)
    assert run(f"--from={folder}/one", f"--to={folder}/model.gguf", "--dtype=q8_0") == 0
    return folder


def cut(path, end):
    os.truncate(path, end if end >= 0 else os.path.getsize(path) + end)


def header_of(path):
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_header(change):
    """Changes the header of the safetensors file, as a value or as text; the rest stays."""

    def damage(folder):
        path = folder / "model.safetensors"
        header, data = header_of(path)
        header = change(header)
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)

    return damage


def with_config(**values):
    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def with_index(change):
    def damage(folder):
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return damage


def renamed(old, new):
    return lambda header: {new if name == old else name: value for name, value in header.items()}


def a_shard_is_gone(folder):
    os.unlink(sorted(folder.glob("model-00002-of-*"))[0])


def a_shard_is_cut(folder):
    cut(sorted(folder.glob("model-00002-of-*"))[0], -100)


def written_over(name, content):
    return lambda folder: (folder / name).write_bytes(content)


FILE = "is cut short or corrupted"
DAMAGES = {
    "header cut": ("one", lambda folder: cut(folder / "model.safetensors", 5), FILE),
    "header length": ("one", written_over("model.safetensors", struct.pack("<Q", 2**60) + b"{}"), FILE),
    "header cut inside": ("one", lambda folder: cut(folder / "model.safetensors", 300), FILE),
    "header of NaN": ("one", with_header(lambda header: b'{"a": NaN}'), FILE),
    "header is no object": ("one", with_header(lambda header: b"[1, 2]"), FILE),
    "data cut": ("one", lambda folder: cut(folder / "model.safetensors", -100), FILE),
    "no data": ("one", written_over("model.safetensors", b""), FILE),
    "tensor renamed": ("one", with_header(renamed(QUERY, "q")), "q_proj.weight is missing in the checkpoint"),
    "tensor of integers": (
        "one",
        with_header(lambda header: header | {QUERY: header[QUERY] | {"dtype": "I32"}}),
        "q_proj.weight is stored as I32, must be one of",
    ),
    "all tensors of integers": (
        "one",
        with_header(lambda header: {name: value | {"dtype": "I32"} for name, value in header.items() if "." in name}),
        "is stored as I32, must be one of",
    ),
    "shape turned": (
        "one",
        with_header(lambda header: header | {QUERY: header[QUERY] | {"shape": [16, 64]}}),
        r"q_proj.weight has the shape \[16, 64\], must be \[32, 32\]",
    ),
    "a shard is gone": ("several", a_shard_is_gone, r"00002-of-\d+.safetensors is missing, the index names it"),
    "a shard is cut": ("several", a_shard_is_cut, rf"00002-of-\d+.safetensors {FILE}"),
    "index names more": (
        "several",
        with_index(lambda index: {"weight_map": index["weight_map"] | {"more": index["weight_map"][QUERY]}}),
        r"of-\d+.safetensors has no more, which model.safetensors.index.json says",
    ),
    "index names less files": (
        "several",
        with_index(
            lambda index: {
                "weight_map": {k: v for k, v in index["weight_map"].items() if v != index["weight_map"][QUERY]}
            }
        ),
        "missing in the checkpoint",
    ),
    "index without a map": ("several", with_index(lambda index: {}), "has no weight_map"),
    "index of no tensors": ("several", with_index(lambda index: {"weight_map": {}}), "holds no tensors"),
    "no tensors": ("one", written_over("model.safetensors", struct.pack("<Q", 2) + b"{}"), "holds no tensors"),
    "index is no JSON": ("several", written_over("model.safetensors.index.json", b"{"), "cannot be read"),
    "config is no JSON": ("one", written_over("config.json", b'{"model_type": '), "config.json cannot be read"),
    "config is a list": ("one", written_over("config.json", b"[]"), "config.json is no JSON object"),
    "config is not text": ("one", written_over("config.json", b"\xff\xfe\x00"), "config.json cannot be read"),
    "no config": ("one", lambda folder: os.unlink(folder / "config.json"), "config.json does not exist"),
    "no weights": ("one", lambda folder: os.unlink(folder / "model.safetensors"), "has neither model.safetensors nor"),
    "unknown architecture": (
        "one",
        with_config(model_type="diffllama"),
        "has model_type 'diffllama', must be one of gpt2|llama",
    ),
    "another head": (
        "one",
        with_config(architectures=["LlamaForTokenClassification"]),
        "must be LlamaForCausalLM for llama",
    ),
    "a head of two labels": (
        "one",
        with_config(architectures=["LlamaForSequenceClassification"]),
        "config.json has 2 labels, must have 1, of a reward model: take the language model",
    ),
    "a size is missing": ("one", with_config(hidden_size=None), "config.json of a llama has no hidden_size"),
    "a size is text": ("one", with_config(num_hidden_layers="two"), "num_hidden_layers|num_layers"),
    "a size is negative": ("one", with_config(num_attention_heads=-4), "num_heads is -4, must be at least 1"),
    "a size is another": ("one", with_config(intermediate_size=48), r"must be \[48, 32\]|mlp_dim is 64"),
    "fewer layers": ("one", with_config(num_hidden_layers=1), "layers.1.* not in the model|num_layers is 2"),
    "gguf magic": (
        "gguf",
        lambda path: path.write_bytes(b"GGML" + path.read_bytes()[4:]),
        "is no GGUF file|cannot be read",
    ),
    "gguf cut in its tensors": ("gguf", lambda path: cut(path, -5000), "cannot be read|cut short"),
    "gguf cut in its metadata": ("gguf", lambda path: cut(path, 100), "cannot be read|cut short"),
    "gguf is empty": ("gguf", lambda path: path.write_bytes(b""), "cannot be read|cut short|no GGUF"),
    "gguf of an unknown type": ("gguf", lambda path: unknown_type(path), "250.* is not a valid GGMLQuantizationType"),
    "gguf of another architecture": (
        "gguf",
        lambda path: path.write_bytes(path.read_bytes().replace(b"llama", b"mamba")),
        "mamba",
    ),
    "gguf without a tensor": (
        "gguf",
        lambda path: path.write_bytes(path.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_z.weight")),
        "attn_",
    ),
}


def unknown_type(path):
    """Changes the quantization type of the first tensor to number 250."""
    content = path.read_bytes()
    at = content.index(b"token_embd.weight") + len("token_embd.weight")
    (dims,) = struct.unpack_from("<I", content, at)
    at += 4 + 8 * dims
    path.write_bytes(content[:at] + struct.pack("<I", 250) + content[at + 4 :])


def corrupted(good, tmp_path, kind, damage):
    path = tmp_path / ("model.gguf" if kind == "gguf" else "model")
    (shutil.copy if kind == "gguf" else shutil.copytree)(good / ("model.gguf" if kind == "gguf" else kind), path)
    damage(path)
    return path


@pytest.mark.parametrize("name", DAMAGES)
def test_convert_reports_it_in_one_line_and_writes_nothing(name, good, tmp_path, capsys):
    kind, damage, told = DAMAGES[name]
    path = corrupted(good, tmp_path, kind, damage)
    for target in ("to", "to.gguf"):
        capsys.readouterr()
        assert run(f"--from={path}", f"--to={tmp_path}/{target}") == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        assert re.search(told, error), error
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_that_begins_from_it_reports_it_in_one_line(name, good, tmp_path):
    kind, damage, told = DAMAGES[name]
    path = corrupted(good, tmp_path, kind, damage)
    here = SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), MODEL.abstract_params)
    with pytest.raises(UserError, match=told) as error:
        open_model.loader(str(path), MODEL)(target)
    assert "\n" not in str(error.value)


def test_undamaged_models_are_read(good):
    for name in ("one", "several", "model.gguf"):
        model = api.build(dataclasses.replace(LLAMA, max_length=64)) if name == "model.gguf" else MODEL
        open_model.loader(str(good / name), model)


def test_extra_tensors_are_refused_and_known_buffers_are_not(good, tmp_path):
    for name, fine in (("model.layers.0.self_attn.rotary_emb.inv_freq", True), ("model.more.weight", False)):
        path = tmp_path / name
        shutil.copytree(good / "one", path)
        header, data = header_of(path / "model.safetensors")
        end = max(value["data_offsets"][1] for key, value in header.items() if key != "__metadata__")
        header[name] = {"dtype": "F32", "shape": [2], "data_offsets": [end, end + 8]}
        text = json.dumps(header).encode()
        (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data + bytes(8))
        if fine:
            open_model.loader(str(path), MODEL)
            continue
        with pytest.raises(UserError, match="model.more.weight is in the checkpoint, not in the model"):
            open_model.loader(str(path), MODEL)


def test_train_reports_it_before_it_compiles(good, tmp_path):
    path = corrupted(good, tmp_path, "several", a_shard_is_gone)
    argv = ["--gin_file=runs/pretrain.gin", "--gin_file=models/tiny.gin", "--gin_file=tasks/stdlib.gin", "--emulate=1"]
    argv += [f"--gin.MODEL_DIR={tmp_path}/run", f"--gin.Trainer.init_from={path}", "--gin.TRAIN_STEPS=1"]
    done = subprocess.run([sys.executable, "-m", "capibara.train", *argv], text=True, capture_output=True)
    assert done.returncode == 2 and "compiling" not in done.stdout
    assert re.search(r"error: .*00002-of-\d+.safetensors is missing, the index names it", done.stderr)
