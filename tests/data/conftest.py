"""A small byte-level tokenizer with the special tokens of many chat templates, and the templates."""

from __future__ import annotations

import json
import pathlib

import pytest

TEMPLATES = pathlib.Path(__file__).parent / "chat_templates"
# bos_token and eos_token of each template's model.
TOKENS = {
    "smollm2": ("<|im_start|>", "<|im_end|>"),
    "llama2": ("<s>", "</s>"),
    "llama3.1": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "gemma": ("<bos>", "<eos>"),
    "phi3": ("<s>", "<|endoftext|>"),
    "qwen2.5": (None, "<|im_end|>"),
    "qwen3": (None, "<|im_end|>"),
    "zephyr": ("<s>", "</s>"),
    "generation": (None, "<|im_end|>"),
}
SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <s> </s> <bos> <eos> <start_of_turn> <end_of_turn> [INST] [/INST]
[TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] <|begin_of_text|> <|eot_id|>
<|start_header_id|> <|end_header_id|> <|system|>""".split()
RSTRIP = ["<|assistant|>", "<|end|>"]  # take the white space after them along, as in Phi-3
TEXT_TOKENS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]  # have ids of their own, and are text


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    texts = [
        "user assistant system It is 4. The weather in the city is fine.\n",
        '{"name": "get", "arguments": {}}',
    ] * 9
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, rstrip=True, special=True) for token in RSTRIP])
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in TEXT_TOKENS])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer_file, tmp_path_factory):
    """Name of a template -> the folder of a tokenizer with it."""

    def make(name: str, template: str | None = None) -> str:
        folder = tmp_path_factory.mktemp(name)
        (folder / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
        bos, eos = TOKENS.get(name, (None, "<|im_end|>"))
        names = {"bos_token": bos, "eos_token": {"__type": "AddedToken", "content": eos, "special": True}}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        text = (TEMPLATES / f"{name}.jinja").read_text().removesuffix("\n") if template is None else template
        (folder / "chat_template.jinja").write_text(text)
        return str(folder)

    made: dict[str, str] = {}

    def cached(name: str, template: str | None = None) -> str:
        if template is not None:
            return make(name, template)
        return made.setdefault(name, None) or made.__setitem__(name, make(name)) or made[name]

    return cached
