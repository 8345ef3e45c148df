"""Chat models' folders, converted to a run folder and back, stop in transformers where they stop here.

Each has the end tokens of a published model, in the same one of config.json and generation_config.json, and weights
that produce each of them in turn. Needs an environment with torch: make test-peer PEER=transformers PEER_PYTHON=PATH/bin/python.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tokenizers

from capibara import config
from capibara.cli import convert
from capibara.cli.composition.models import load_run
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.models import api
from capibara.multihost import exits

HERE = pathlib.Path(__file__).resolve().parent
PYTHON = os.environ.get("TORCH_PYTHON")
NEW_TOKENS = 8
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(max_position_embeddings=64, rms_norm_eps=1e-5, hidden_act="silu")
GELU = dict(hidden_activation="gelu_pytorch_tanh", hidden_act="gelu_pytorch_tanh", head_dim=16)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3["original_max_position_embeddings"] = 16
LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}


def chat(model_type, vocab_size, ends, eos, in_config=None, **values):
    """config.json and generation_config.json of a published chat model with smaller sizes; and its eos_token.

    ends: eos_token_id in generation_config.json; in_config: in config.json, if it differs.
    """
    about = SIZES | dict(model_type=model_type, vocab_size=vocab_size, eos_token_id=in_config or ends) | values
    about |= {"tie_word_embeddings": values.get("tie_word_embeddings", False)}
    return about, {"eos_token_id": ends, "do_sample": True, "temperature": 0.6, "top_p": 0.9}, eos


CHATS = {
    "llama3_8b_instruct": chat("llama", 128_256, [128_001, 128_009], 128_009, 128_009, rope_theta=5e5),
    "llama3.2_1b_instruct": chat(
        "llama", 128_256, [128_001, 128_008, 128_009], 128_009, rope_scaling=LLAMA3, tie_word_embeddings=True
    ),
    "gemma2_2b_it": chat(
        "gemma2", 256_000, [1, 107], 1, **GELU, tie_word_embeddings=True, sliding_window=8, query_pre_attn_scalar=16
    ),
    "gemma3_1b_it": chat(
        "gemma3_text",
        262_144,
        [1, 106],
        1,
        **GELU,
        tie_word_embeddings=True,
        sliding_window=8,
        query_pre_attn_scalar=16,
    ),
    "qwen2.5_0.5b_instruct": chat(
        "qwen2", 151_936, [151_645, 151_643], 151_645, 151_645, tie_word_embeddings=True, use_sliding_window=False
    ),
    "qwen3_0.6b": chat("qwen3", 151_936, [151_645, 151_643], 151_645, 151_645, head_dim=16, tie_word_embeddings=True),
    "phi3_mini_4k_instruct": chat("phi3", 32_064, [32_000, 32_001, 32_007], 32_000, 32_000, sliding_window=2047),
    "phi3_mini_128k_instruct": chat(
        "phi3", 32_064, [32_000, 32_001, 32_007], 32_000, 32_000, rope_scaling=LONG, original_max_position_embeddings=32
    ),
    "mistral_7b_instruct": chat("mistral", 32_768, 2, 2, sliding_window=None),
    "mixtral_8x7b_instruct": chat("mixtral", 32_000, 2, 2, num_local_experts=4, num_experts_per_tok=2),
    "smollm2_135m_instruct": chat("llama", 49_152, 2, 2, tie_word_embeddings=True),
    "yi_6b_chat": chat("llama", 64_000, 7, 7, 2),
}

pytestmark = pytest.mark.skipif(not PYTHON, reason="TORCH_PYTHON names no python with torch")


def tokenizer(path, vocab_size, eos, ends):
    words = {f"w{i}" if i not in ends else f"<|end_{i}|>": i for i in range(vocab_size)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens([f"<|end_{i}|>" for i in ends])
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": f"<|end_{eos}|>"}))


def chains(params, ends, tied, offset):
    """Weights with which each end follows two tokens after a prompt's last one: (parameters, those last tokens).

    The layers add nothing. The logits after a token are a row of a symmetric matrix, embedding x scale of the last norm
    x embedding; the weights of a chain in it grow towards its end.
    """
    embedding = np.zeros(params["embedding"].shape, np.float32)
    scale, starts = np.ones(embedding.shape[1], np.float32), []
    for number, end in enumerate(ends):
        chain = [10 + 10 * number, 11 + 10 * number, 12 + 10 * number, end]
        matrix = np.zeros((4, 4))
        for at, weight in enumerate((1.0, 2.0, 3.0)):
            matrix[at, at + 1] = matrix[at + 1, at] = weight
        values, vectors = np.linalg.eigh(matrix)
        dims = slice(4 * number, 4 * number + 4)
        embedding[chain, dims] = vectors * np.sqrt(np.abs(values))
        scale[dims], starts = np.sign(values), [*starts, chain[0]]
    own = {"embedding": embedding, "final_norm": {"scale": scale - offset}}
    return params | own | ({} if tied else {"output": embedding}), starts


def written(path, about, generation, eos):
    """A chat model's folder, and the last tokens of prompts that lead to each of its ends."""
    path.mkdir(parents=True)
    plain = api.build(hf_config.from_hf(about, dtype="float32"))
    rng, silent = np.random.default_rng(0), ("/out", "/down")
    names = iter(_names(plain))
    drawn = lambda s: 0.3 * rng.standard_normal(s.shape, np.float32) * (not next(names).endswith(silent))  # noqa: E731
    params = jax.tree.map(drawn, plain.abstract_params)
    listed = generation["eos_token_id"]
    ends = listed if isinstance(listed, list) else [listed]
    params, starts = chains(params, ends, plain.config.head == "tied", plain.config.norm_scale == "offset")
    values = hf_config.to_hf(plain.config, about, dtype="float32")
    tensors = open_model.hf_tensors(params, plain, values["model_type"])
    shapes = open_model.hf_shapes(plain, values["model_type"])
    others = {"generation_config.json": json.dumps(generation).encode()}
    hf_folder.save_hf(str(path / "before"), about | {"dtype": "float32"}, shapes, tensors, others, dtype="float32")
    tokenizer(path / "before", about["vocab_size"], eos, sorted({*ends, eos}))
    return starts


def _names(model):
    from capibara.core import tree

    return tree.path_names(model.abstract_params)


def run(*argv):
    config.reset()
    try:
        assert exits.run_verb(convert.main, [str(arg) for arg in argv]) == 0
    finally:
        config.reset()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops")
    for name, case in CHATS.items():
        path = folder / name
        starts = written(path, *case)
        (path / "prompts.json").write_text(json.dumps([[5, 6, start] for start in starts]))
        run(f"--from={path}/before", f"--to={path}/run", "--format=capibara")
        run(f"--from={path}/run", f"--to={path}/after")
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    argv = [PYTHON, str(HERE / "stops_peer.py"), str(folder)]
    done = subprocess.run(argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]
    return folder


@pytest.mark.parametrize("name", CHATS)
def test_an_exported_chat_model_stops_where_ours_does(name, folder):
    path, (about, generation, _) = folder / name, CHATS[name]
    prompts, want = (json.loads((path / file).read_text()) for file in ("prompts.json", "found.json"))
    config.reset()
    loaded = load_run(str(path / "run"))
    vocabulary = loaded.trainer.dataset.get_vocabulary()
    engine = Engine(loaded.model, loaded.params, vocabulary, 16, EngineConfig(slots=2))
    asked = Sampling(temperature=0.0, max_new_tokens=NEW_TOKENS)
    streams = [engine.submit(prompt, asked) for prompt in prompts]
    listed = generation["eos_token_id"]
    ends = listed if isinstance(listed, list) else [listed]
    for end, prompt, row, stream in zip(ends, prompts, want, streams, strict=True):
        result = stream.result()
        print(f"\n{name:>24}: {row} and {result.tokens}, {result.end}", file=sys.stderr)
        assert row == [prompt[-1] + 1, prompt[-1] + 2, end]
        assert (result.tokens, result.end) == (row[:-1], end)
    assert set(vocabulary.end_ids) >= {*ends}
    assert json.loads((path / "after" / "generation_config.json").read_text()) == generation
    exported = json.loads((path / "after" / "config.json").read_text())
    assert (exported["model_type"], exported["eos_token_id"]) == (about["model_type"], about["eos_token_id"])
