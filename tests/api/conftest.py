"""A small model with a chat template, and data for it."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import tokenizers

from capibara import config
from capibara.cli.composition import models
from capibara.interop import conversion, gin_of
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.training import run_folder

CONFIG = DecoderConfig(
    vocab_size=264, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=64, dtype="float32", max_length=128
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("river", "grass", "swims", "eats", "sun")


def chats(count: int) -> list[dict]:
    rng = np.random.default_rng(0)
    turns = [("user", lambda: f"{rng.choice(WORDS)}?"), ("assistant", lambda: " ".join(rng.choice(WORDS, 4)))]
    return [{"messages": [{"role": role, "content": text()} for role, text in turns]} for _ in range(count)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    """A folder with the model as a Hugging Face folder `hf` and a file `m.gguf`, and chats.jsonl, texts, pairs and prompts."""
    there = tmp_path_factory.mktemp("small")
    special = ["<eos>", "<|im_start|>", "<|im_end|>"]
    pieces = [*special, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ab"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, [("a", "b")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(special)
    run = there / "run"
    run.mkdir()
    made.save(str(run / "tokenizer.json"))
    beside = json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    (run / "tokenizer_config.json").write_text(beside)
    files = {"tokenizer.json": b"", "tokenizer_config.json": beside.encode()}
    params = jax.jit(api.build(CONFIG).init)(jax.random.key(0))
    run_folder.save(str(run), params, gin_of.run(CONFIG, str(run), files))
    for form, target in (("hf", "hf"), ("gguf", "m.gguf")):
        conversion.convert(str(run), str(there / target), form, "f32", None, models.ModelReader())
    config.reset()
    rows = {
        "chats": chats(60),
        "texts": [{"text": f"{a} {b} {a} {b}"} for a in WORDS for b in WORDS],
        "pairs": [{"prompt": f"{word}?", "chosen": "river", "rejected": "no"} for word in WORDS] * 5,
        "prompts": [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(30)],
    }
    for name, records in rows.items():
        (there / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(there)


def save_reward(folder, path, largest: float = 0.1) -> str:
    """A reward model of random weights, whose weights of the score are at most `largest`, with the tokenizer and chat template of the model."""
    files = {name: b"" for name in ("tokenizer.json", "tokenizer_config.json")}
    for name in files:
        (path / name).write_bytes(open(f"{folder}/run/{name}", "rb").read())
    files["tokenizer_config.json"] = (path / "tokenizer_config.json").read_bytes()
    scored = dataclasses.replace(CONFIG, head="score")
    params = jax.tree.map(lambda x: x * 3, jax.jit(api.build(scored).init)(jax.random.key(2)))
    params["score"] = params["score"] / abs(params["score"]).max() * largest
    run_folder.save(str(path), params, gin_of.run(scored, str(path), files))
    config.reset()
    return str(path)
