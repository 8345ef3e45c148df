"""A tiny model with a tokenizer and a chat template, as a Hugging Face folder."""

from __future__ import annotations

import json

import pytest

TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('the role ' + message.role + ' is not known') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LENGTH = 256


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    import jax
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from capibara.interop import open_model
    from capibara.interop.hf import config as hf_config
    from capibara.interop.hf import folder as hf_folder
    from capibara.models import api

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=letters | {"th": 256}, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in special])
    about = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(about)}
    sizes = dict(vocab_size=260, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32")
    model = api.build(api.DecoderConfig(**sizes))
    # Large weights, so that one token is far likelier than the others and texts do not agree by chance.
    params = jax.tree.map(lambda x: x * 3, jax.jit(model.init)(jax.random.key(1)))
    values = hf_config.to_hf(model.config, {"max_position_embeddings": LENGTH})
    path = tmp_path_factory.mktemp("models") / "tiny"
    hf_folder.save_hf(
        str(path),
        values,
        open_model.hf_shapes(model, values["model_type"]),
        open_model.hf_tensors(params, model, values["model_type"]),
        {name: text.encode() for name, text in files.items()},
        dtype="float32",
    )
    return str(path)


@pytest.fixture(scope="session")
def run(folder):
    """The model as a run, in float32."""
    from capibara import config
    from capibara.cli.composition.models import load

    config.reset()
    return load(folder, bindings=["DecoderConfig.dtype = 'float32'"])


@pytest.fixture(scope="session")
def served(run):
    """The model in an engine with two slots, and its chat."""
    from capibara.inference.engine.engine import Engine, EngineConfig
    from capibara.inference.interactive import chat
    from capibara.inference.sampling.sampling import Sampling
    from capibara.inference.server.service.service import Served

    vocabulary, batching = run.tokenizer, EngineConfig(slots=2, prefix_cache_mib=1)
    engine = Engine(run.model, run.params, vocabulary, LENGTH, batching)
    with engine.start():
        yield Served(engine, vocabulary, chat.of_run(run.dataset), LENGTH, None, "tiny", Sampling(max_new_tokens=8))
