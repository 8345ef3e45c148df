"""Small Llamas in Hugging Face folders, and `capibara merge` on them."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file

from capibara import config
from capibara.cli import merge as verb
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.multihost import exits

SIZES = dict(vocab_size=258, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=48, dtype="float32")
QUERY = "model.layers.{}.self_attn.q_proj"
PYTHON = os.environ.get("MERGEKIT_PYTHON")


def tokenizer(eos="<eos>"):
    """The files of a byte-level tokenizer."""
    pieces = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([eos, *pieces, "th"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("t", "h")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([eos])
    return {"tokenizer.json": made.to_str().encode()}


def write(folder, seed, *, files=None, dtype="float32", of=None, **sizes):
    """A Hugging Face folder of a small Llama (or `of`) near one that is the same for all seeds."""
    of = of or DecoderConfig(**SIZES | {"head": "separate"} | sizes)
    values = hf_config.to_hf(of) | {"eos_token_id": 0}
    shapes = open_model.hf_shapes(api.build(of), values["model_type"])
    base, own = np.random.default_rng(7), np.random.default_rng(seed)
    tensors = [
        (
            name,
            np.float32(0.1) * base.standard_normal(shape, np.float32)
            + seed * np.float32(0.02) * own.standard_normal(shape, np.float32),
        )
        for name, shape in shapes.items()
    ]
    files = tokenizer() if files is None else files
    hf_folder.save_hf(str(folder), values, shapes, tensors, files, dtype=dtype)


def run(*argv):
    config.reset()
    return exits.run_verb(verb.main, [str(arg) for arg in argv])


def weights(folder):
    return load_file(pathlib.Path(folder) / "model.safetensors")


def assert_close(got, want, atol=1e-6):
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name].astype(np.float32), value, rtol=0, atol=atol, err_msg=name)


def refused(capfd, *argv):
    capfd.readouterr()
    code = run(*argv)
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("merging, ")]  # a slow machine tells its progress
    assert (code, out, len(lines)) == (2, "", 1) and lines[0].startswith("error: "), (code, out, err)
    return lines[0]


def assert_broken_is_named(capfd, models, folder, method, tensor, value):
    """A merge of model a with one that has a value in a tensor names that model and leaves nothing."""
    write(folder / "broken", 1)
    values = weights(folder / "broken")
    values[tensor][(3,) * values[tensor].ndim] = value
    save_file(values, folder / "broken" / "model.safetensors")
    said = refused(capfd, models / "a", folder / "broken", method, f"--to={folder}/out")
    assert f"{folder}/broken: {tensor} has values that are not finite" in said
    assert sorted(os.listdir(folder)) == ["broken"]
