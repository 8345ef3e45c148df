"""GGUF files: we read what we write, and llama.cpp computes the same results from it."""

from __future__ import annotations

import json
import pathlib
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
import tokenizers

sys.path += [
    str(pathlib.Path(__file__).resolve().parent),
    str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"),
]
import gguf  # noqa: E402
import gguf_cases as cases  # noqa: E402

from capibara import config
from capibara.cli import convert
from capibara.core.types import UserError  # noqa: E402
from capibara.interop.gguf import names as gguf_names
from capibara.interop.gguf import vocabulary as gguf_vocabulary  # noqa: E402
from capibara.interop.gguf.layout import rope as gguf_rope
from capibara.interop.gguf.read import GgufModel, open_gguf  # noqa: E402
from capibara.interop.gguf.write import write_gguf  # noqa: E402
from capibara.interop.hf import config as hf_config  # noqa: E402
from capibara.models import api  # noqa: E402
from capibara.models.architectures.shared_keys import parts  # noqa: E402
from capibara.multihost import exits

TEXTS = (
    "Hello world, it's 2026!",
    "  two  spaces\n\n\tand a tab\r\n",
    "def f(x):\n    return x ** 2  # Größe",
    "Привет 日本語 हिन्दी 😀 e\u0301 ٣٤ ²",
    "<s>the tin</s> and <|bos|>the<|eos|> end",
)


def config_of(name: str) -> dict:
    return dict(cases.CASES[name])


def write(path, name: str = "llama", dtype: str = "f32", tokenizer=None, **changes) -> pathlib.Path:
    """The tiny model of a case, as a GGUF file."""
    config = config_of(name) | changes
    write_gguf(path, config, cases.tensors(config), tokenizer or cases.byte_level(), dtype=dtype)
    return path


def copy(source, target, *, values=None, drop=(), more=None, stored=None) -> pathlib.Path:
    """A GGUF file with changed metadata (None removes a key), fewer or more tensors, or other (bytes, type) of some."""
    reader, values, stored = gguf.GGUFReader(source), values or {}, stored or {}
    writer = gguf.GGUFWriter(target, values.get("general.architecture") or "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in values and key != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(key, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for key, value in values.items():
        if value is not None and key != "general.architecture":
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        if tensor.name in stored:
            data, kind = stored[tensor.name]
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
        elif tensor.name not in drop:
            writer.add_tensor(tensor.name, tensor.data)
    for name, value in (more or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("name", cases.CASES)
def test_float32_comes_back_as_it_was(name, tmp_path):
    config, found = config_of(name), open_gguf(write(tmp_path / "model.gguf", name))
    assert hf_config.differences(found.config, hf_config.from_hf(config)) == {}
    values = dict(cases.tensors(config))
    assert found.shapes() == {key: value.shape for key, value in values.items()}
    for key, value in values.items():
        got = found.read(key)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, value, err_msg=key)


def test_gemma_3n_fills_what_llama_cpp_wants_and_the_model_lacks(tmp_path):
    """Keys and values of layers that share them, and the rows that the per-layer table does not have."""
    path = write(tmp_path / "model.gguf", "gemma3n", vocab_size_per_layer_input=300)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    assert all(not stored[f"blk.{layer}.attn_{part}.weight"].any() for layer in (20, 21) for part in ("k", "v"))
    assert (stored["blk.21.attn_k_norm.weight"] == 1).all() and stored["blk.19.attn_v.weight"].any()
    table = dict(cases.tensors(config_of("gemma3n") | {"vocab_size_per_layer_input": 300}))[
        "model.embed_tokens_per_layer.weight"
    ]
    np.testing.assert_array_equal(stored["per_layer_token_embd.weight"][:300], table)
    np.testing.assert_array_equal(stored["per_layer_token_embd.weight"][300:], np.repeat(table[:1], 20, axis=0))
    found = open_gguf(path)
    assert (
        found.config["vocab_size_per_layer_input"] == 320
        and "model.layers.20.self_attn.k_proj.weight" not in found.shapes()
    )
    with pytest.raises(UserError, match="num_kv_shared_layers .* is 3, llama.cpp computes 2"):
        write(tmp_path / "model.gguf", "gemma3n", num_kv_shared_layers=3)
    with pytest.raises(UserError, match=r"intermediate_size of the gemma3n_text model is \[256, 512, "):
        write(tmp_path / "model.gguf", "gemma3n", intermediate_size=[256] + [512] * 21)
    with pytest.raises(UserError, match="attention.shared_kv_layers. is 4, llama.cpp computes 2"):
        open_gguf(
            copy(
                path,
                tmp_path / "other.gguf",
                values={"general.architecture": "gemma3n", "gemma3n.attention.shared_kv_layers": 4},
            )
        )


def test_queries_and_keys_of_llama_are_paired(tmp_path):
    path = write(tmp_path / "model.gguf", "llama")
    values = dict(cases.tensors(config_of("llama")))
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    for name, part, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        want, got = values[f"model.layers.1.self_attn.{part}.weight"], stored[f"blk.1.{name}.weight"]
        for head in range(heads):
            for half in range(2):
                for i in range(4):  # half of head_dim
                    np.testing.assert_array_equal(got[8 * head + 2 * i + half], want[8 * head + 4 * half + i])


def test_norms_of_gemma_have_one_added_and_experts_are_stacked(tmp_path):
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(write(tmp_path / "g.gguf", "gemma2")).tensors}
    values = dict(cases.tensors(config_of("gemma2")))
    np.testing.assert_array_equal(stored["output_norm.weight"], values["model.norm.weight"] + 1)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(write(tmp_path / "m.gguf", "mixtral")).tensors}
    values = dict(cases.tensors(config_of("mixtral")))
    want = values["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    np.testing.assert_array_equal(stored["blk.1.ffn_up_exps.weight"][2], want)


# Largest error of a value in a block of 32, as a share of the block's largest: half a step (in 4 bits a whole one at
# the upper end, as the codes have -8 but not 8), and float16's rounding of the step.
@pytest.mark.parametrize("dtype, share", [("f16", 2**-11), ("bf16", 2**-8), ("q8_0", 0.57 / 127), ("q4_0", 1.01 / 8)])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_smaller_types_are_within_their_step(name, dtype, share, tmp_path):
    config = config_of(name)
    path = write(tmp_path / "model.gguf", name, dtype)
    found, vectors = open_gguf(path), 0
    for key, value in cases.tensors(config):
        got = found.read(key).astype(np.float32)
        if value.ndim == 1 or "gate.weight" in key or "wpe" in key:
            np.testing.assert_array_equal(got, value)
            vectors += 1
            continue
        blocks = lambda x: (x.T if "c_" in key else x).reshape(-1, 32)  # noqa: E731
        largest = np.abs(blocks(value)).max(-1, keepdims=True)
        assert (np.abs(blocks(got) - blocks(value)) <= share * largest).all(), key
        assert dtype == "f32" or not np.array_equal(got, value)
    assert vectors > 3
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.attn_output.weight"] == dtype.upper()
    assert kinds["token_embd.weight"] == {"q4_0": "Q8_0"}.get(dtype, dtype.upper())


def test_rows_that_are_no_blocks_are_float16(tmp_path):
    path = write(tmp_path / "model.gguf", "llama", "q4_0", intermediate_size=48)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16" and kinds["blk.0.ffn_up.weight"] == "Q4_0"


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_other_quantizations_are_undone(kind, tmp_path):
    values, kind = dict(cases.tensors(config_of("llama"))), gguf.GGMLQuantizationType[kind]
    source, key = write(tmp_path / "f32.gguf"), "model.layers.0.mlp.up_proj.weight"
    stored = {"blk.0.ffn_up.weight": (gguf.quantize(values[key], kind), kind)}
    error = np.abs(open_gguf(copy(source, tmp_path / "model.gguf", stored=stored)).read(key) - values[key]).max()
    assert 0 < error < np.abs(values[key]).max() / (6 if "4" in kind.name else 12)


def test_k_quantizations_are_undone(tmp_path):
    step = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    # 256 values each: low bits, high bits, 16 scales, step; and step, no offset, 8 scales in 6 bits, values.
    q6 = np.concatenate([np.zeros(192, np.uint8), np.full(16, 2, np.uint8), step])
    q4 = np.concatenate(
        [step, np.zeros(2, np.uint8), np.repeat([1, 0, 1], 4).astype(np.uint8), np.full(128, 0x33, np.uint8)]
    )
    types = gguf.GGMLQuantizationType
    stored = {
        "blk.0.ffn_down.weight": (np.tile(q6, (32, 1)), types.Q6_K),
        "blk.1.ffn_down.weight": (np.tile(q4, (32, 1)), types.Q4_K),
    }
    source = write(tmp_path / "f32.gguf", intermediate_size=256)
    found = open_gguf(copy(source, tmp_path / "model.gguf", stored=stored))
    for layer, value in ((0, 0.5 * 2 * -32), (1, 0.5 * 3)):
        got = found.read(f"model.layers.{layer}.mlp.down_proj.weight")
        np.testing.assert_array_equal(got, np.full((32, 256), value, np.float32))


def test_tensors_may_come_in_any_order(tmp_path):
    config = config_of("mixtral")
    values = list(cases.tensors(config))
    for name, ordered in (("a", values), ("b", values[::-1])):
        write_gguf(tmp_path / name, config, iter(ordered), cases.byte_level(), dtype="q8_0")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_head_of_a_tied_model_is_left_out(tmp_path):
    config = config_of("smollm2")
    values = [*cases.tensors(config), ("lm_head.weight", np.zeros((cases.VOCAB, 32), np.float32))]
    write_gguf(tmp_path / "model.gguf", config, values, cases.byte_level(), dtype="f32")
    assert "lm_head.weight" not in open_gguf(tmp_path / "model.gguf").shapes()


@pytest.mark.parametrize("theta, head_dim", [(500_000.0, 128), (500_000.0, 64), (10_000.0, 16)])
def test_llama3_factors_tell_their_scaling(theta, head_dim):
    rope = dict(rope_type="llama3", rope_theta=theta, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
    rope["original_max_position_embeddings"] = 8192
    factors = gguf_rope.llama3_factors(rope, head_dim)
    values = {"rope.freq_base": theta, "rope.dimension_count": head_dim}
    family = gguf_names.of_config({"model_type": "llama"})
    assert gguf_rope.from_metadata(values, family, head_dim, factors) == {"rope_parameters": rope}
    odd = rope | {"high_freq_factor": 5.0, "original_max_position_embeddings": 4096}
    if head_dim > 16:  # with fewer frequencies between the two ends nothing identifies the scaling
        got = gguf_rope.from_metadata(values, family, head_dim, gguf_rope.llama3_factors(odd, head_dim))
        assert got == {"rope_parameters": odd}
    with pytest.raises(UserError, match="no llama3 scaling"):
        gguf_rope.from_metadata(values, family, head_dim, np.linspace(1, 9, head_dim // 2, dtype=np.float32))


def encode(files: dict[str, bytes], text: str, special: bool = False) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    return tokenizer.encode(text, add_special_tokens=special).ids


TOKENIZERS = {pre: lambda pre=pre: cases.byte_level(pre) for pre in gguf_vocabulary.PRES} | {
    "llama": cases.sentencepiece
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_come_back(name, tmp_path):
    files = TOKENIZERS[name]()
    found = open_gguf(write(tmp_path / "model.gguf", tokenizer=files)).tokenizer
    for text in TEXTS:
        assert encode(found, text) == encode(files, text), text
    tokenizer = tokenizers.Tokenizer.from_str(found["tokenizer.json"].decode())
    assert tokenizer.decode(encode(found, TEXTS[3])) == TEXTS[3]
    said, before = json.loads(found["tokenizer_config.json"]), json.loads(files["tokenizer_config.json"])
    assert (said["bos_token"], said["eos_token"]) == (before["bos_token"], before["eos_token"]["content"])
    assert found["chat_template.jinja"] == files["chat_template.jinja"]
    assert json.loads(found["generation_config.json"])["eos_token_id"] == tokenizer.token_to_id(said["eos_token"])
    assert not any(token.startswith("[PAD") for token in tokenizer.get_vocab())
    # A second time: nothing is lost in between.
    again = open_gguf(write(tmp_path / "again.gguf", tokenizer=found)).tokenizer
    assert again == found


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def pre_tokenized(*steps: dict, ignore_merges: bool = False) -> dict[str, bytes]:
    """The files of a byte-level tokenizer with these steps before its merges."""
    files = dict(cases.byte_level())
    spec = json.loads(files["tokenizer.json"])
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(steps)}
    spec["model"]["ignore_merges"] = ignore_merges
    return files | {"tokenizer.json": json.dumps(spec).encode()}


# As files have them, in other words than llama.cpp: Falcon's, and what was converted from tiktoken.
OTHER_WORDS = {
    "falcon, other words": pre_tokenized(
        {"type": "Punctuation", "behavior": "Contiguous"},
        _BYTES | {"use_regex": True},
        {"type": "Digits", "individual_digits": False},
        {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False},
    ),
    "dbrx, other words": pre_tokenized(
        {
            "type": "Split",
            "pattern": {"Regex": gguf_vocabulary.PRES["dbrx"].splits[0].replace(r"\r", "\r").replace(r"\n", "\n")},
            "behavior": "Removed",
            "invert": True,
        },
        _BYTES,
    ),
}


@pytest.mark.parametrize("name", OTHER_WORDS)
def test_splits_are_recognised_in_other_words(name, tmp_path):
    files = OTHER_WORDS[name]
    path = write(tmp_path / "model.gguf", tokenizer=files)
    assert gguf.GGUFReader(path).fields["tokenizer.ggml.pre"].contents() == name.partition(",")[0]
    found = open_gguf(path).tokenizer
    for text in TEXTS:
        assert encode(found, text) == encode(files, text), text


def test_what_encloses_a_text_is_kept(tmp_path):
    files = dict(cases.byte_level("llama-bpe"))
    made = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    files["tokenizer.json"] = made.to_str().encode()
    found = open_gguf(write(tmp_path / "model.gguf", tokenizer=files)).tokenizer
    assert encode(found, "the", special=True) == [0, *encode(files, "the"), 1]


def test_the_end_of_an_answer_ends_the_generation_too(tmp_path):
    path = copy(write(tmp_path / "a.gguf"), tmp_path / "b.gguf", values={"tokenizer.ggml.eot_token_id": 7})
    assert json.loads(open_gguf(path).tokenizer["generation_config.json"])["eos_token_id"] == [1, 7]


def test_every_end_of_a_text_is_kept(tmp_path):
    """Like Llama 3 Instruct: the end token, the end of a turn, and the end of a message before a tool's."""
    ends = [1, 7, 9]
    files = dict(cases.byte_level()) | {"generation_config.json": json.dumps({"eos_token_id": [7, 1, 9]}).encode()}
    path = write(tmp_path / "a.gguf", tokenizer=files)
    found = open_gguf(path).tokenizer
    assert json.loads(found["generation_config.json"])["eos_token_id"] == ends
    write(tmp_path / "b.gguf", tokenizer=found)
    assert (tmp_path / "b.gguf").read_bytes() == path.read_bytes()
    tokens = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()
    kinds = gguf.GGUFReader(path).fields["tokenizer.ggml.token_type"].contents()
    tokens[12], kinds[12], tokens[13] = "<end_of_turn>", gguf_vocabulary.CONTROL, "<|im_end|>"  # the last: plain text
    values = {"ggml.tokens": tokens, "ggml.token_type": kinds, "ggml.model": "llama", "ggml.eos_token_id": 1}
    made = gguf_vocabulary.files(values | {"ggml.scores": [0.0] * len(tokens)}, "x")
    assert json.loads(made["generation_config.json"])["eos_token_id"] == [1, 12]


def test_name_and_licence_go_through_a_run_folder(tmp_path):
    said = {
        "general.name": "Capy: 1B", "general.license": "apache-2.0", "general.license.link": "https://x.y/z#1",
        "general.organization": "Some \"Org\"", "general.tags": ["chat", "no"], "general.languages": ["en"],
        "general.size_label": "1B",
    }  # fmt: skip
    path = copy(write(tmp_path / "a.gguf"), tmp_path / "b.gguf", values=said)
    for source, target in (
        (path, "run"),
        (tmp_path / "run", "c.gguf"),
        (tmp_path / "c.gguf", "hf"),
        (tmp_path / "hf", "d.gguf"),
    ):
        form = ["--format=capibara"] if target == "run" else []
        assert exits.run_verb(convert.main, [f"--from={source}", f"--to={tmp_path / target}", *form]) == 0
        config.reset()
    for name in ("c.gguf", "d.gguf"):
        fields = gguf.GGUFReader(tmp_path / name).fields
        assert {key: fields[key].contents() for key in said} == said
    assert "license: apache-2.0" in (tmp_path / "hf" / "README.md").read_text()


def test_a_sentencepiece_model_becomes_a_tokenizer(tmp_path):
    data = cases.sentencepiece_model()
    model, files = sentencepiece.SentencePieceProcessor(model_proto=data), {"tokenizer.model": data}
    path = write(tmp_path / "model.gguf", tokenizer=files, vocab_size=432, bos_token_id=0, eos_token_id=1)
    found = open_gguf(path).tokenizer
    for text in (*TEXTS[:4], cases.TEXT):
        assert encode(found, text) == model.encode(text), text
    assert encode(found, "a", special=True) == [0, *model.encode("a")]
    tokenizer = tokenizers.Tokenizer.from_str(found["tokenizer.json"].decode())
    assert tokenizer.decode(encode(found, TEXTS[1])) == TEXTS[1]
    for match, changes in (("unigram model", {"model_type": "unigram"}), ("changes the text", {"rule": "nmt_nfkc"})):
        with one_line(match):
            write(path, tokenizer={"tokenizer.model": cases.sentencepiece_model(**changes)}, vocab_size=432)


@pytest.mark.parametrize(
    "templates",
    [
        [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}],
        [{"name": "rag", "template": "{{ documents }}"}],
    ],
)
def test_every_named_template_is_kept(templates, tmp_path):
    files = {name: content for name, content in cases.byte_level().items() if name != "chat_template.jinja"}
    config = json.loads(files["tokenizer_config.json"]) | {"chat_template": templates}
    path = write(tmp_path / "model.gguf", tokenizer=files | {"tokenizer_config.json": json.dumps(config).encode()})
    # The keys of gguf.GGUFWriter.add_chat_template, in gguf 0.19.
    fields = gguf.GGUFReader(path).fields
    named = {one["name"]: one["template"] for one in templates if one["name"] != "default"}
    assert fields["tokenizer.chat_templates"].contents() == list(named)
    assert {name: fields[f"tokenizer.chat_template.{name}"].contents() for name in named} == named
    found = open_gguf(path).tokenizer
    assert (
        json.loads(found["tokenizer_config.json"])["chat_template"] == templates and "chat_template.jinja" not in found
    )


def test_without_a_tokenizer_there_is_none(tmp_path):
    config = config_of("llama")
    write_gguf(tmp_path / "model.gguf", config, cases.tensors(config), {}, dtype="f32")
    assert open_gguf(tmp_path / "model.gguf").tokenizer == {}


def test_a_tokenizer_that_is_not_known_is_warned_about(tmp_path):
    path = copy(write(tmp_path / "a.gguf"), tmp_path / "b.gguf", values={"tokenizer.ggml.pre": "viking"})
    with pytest.warns(UserWarning, match="'viking' is not known here"):
        assert open_gguf(path).tokenizer == {}


def test_a_window_that_llama_cpp_lacks_is_warned_about(tmp_path):
    with pytest.warns(UserWarning, match="longer than 8 tokens"):
        path = write(tmp_path / "model.gguf", "mistral", sliding_window=8)
    assert open_gguf(path).config["sliding_window"] == 8


def one_line(match: str):
    return pytest.raises(UserError, match=rf"^[^\n]*{match}[^\n]*$")


def test_bad_files(tmp_path):
    path, other = write(tmp_path / "good.gguf"), tmp_path / "bad.gguf"
    whole = path.read_bytes()
    for size in (10, 500, 9000, len(whole) - 100):
        other.write_bytes(whole[:size])
        with one_line("cut short or corrupted"):
            open_gguf(other)
    other.write_bytes(b"PK\x03\x04" + whole[4:])
    with one_line("no GGUF file"):
        open_gguf(other)
    with one_line("cannot be read"):
        open_gguf(tmp_path / "none.gguf")
    with one_line("'rwkv7' is not known here, must be one of afmoe"):
        open_gguf(copy(path, other, values={"general.architecture": "rwkv7"}))
    with one_line("tensor blk.1.attn_k.weight is missing"):
        open_gguf(copy(path, other, drop=("blk.1.attn_k.weight",)))
    with one_line("tensor blk.0.ffn_up.bias is not known in llama models"):
        open_gguf(copy(path, other, more={"blk.0.ffn_up.bias": np.zeros(64, np.float32)}))
    with one_line("blk.0.ffn_gate.weight has shape .64, 32., must have .96, 32."):
        open_gguf(copy(path, other, values={"llama.feed_forward_length": 96}))
    with one_line("no llama.embedding_length"):
        open_gguf(copy(path, other, values={"llama.embedding_length": None}))
    with one_line("varies from layer to layer"):
        open_gguf(copy(path, other, values={"llama.feed_forward_length": [64, 32]}))
    with one_line("one of 3 parts"):
        open_gguf(copy(path, other, values={"split.count": 3}))
    with one_line("must be none, linear or yarn"):
        open_gguf(copy(path, other, values={"llama.rope.scaling.type": "longrope"}))
    with one_line("llama.attention.scale is 0.5, llama models here have none"):
        open_gguf(copy(path, other, values={"llama.attention.scale": 0.5}))
    with one_line("sliding_window_pattern is .True., must be a list with one entry for each of 2 layers"):
        gemma2 = write(tmp_path / "gemma2.gguf", "gemma2")
        values = {"general.architecture": "gemma2", "gemma2.attention.sliding_window_pattern": [True]}
        open_gguf(copy(gemma2, other, values=values))
    with one_line("llama.block_count is 5000000, must be 1 to"):
        open_gguf(copy(path, other, values={"llama.block_count": 5_000_000}))
    with one_line("rope.scaling.factor is None"):
        open_gguf(copy(path, other, values={"llama.rope.scaling.type": "linear"}))
    with one_line("has not all of tokens, merges"):
        open_gguf(copy(path, other, values={"tokenizer.ggml.merges": None})).tokenizer  # noqa: B018
    with one_line("merges do not fit"):
        open_gguf(copy(path, other, values={"tokenizer.ggml.merges": ["no such"]})).tokenizer  # noqa: B018
    with one_line("more tokens than scores or types"):
        open_gguf(copy(path, other, values={"tokenizer.ggml.token_type": [1, 1]})).tokenizer  # noqa: B018
    assert open_gguf(copy(path, other)).config == open_gguf(path).config


# Metadata beside a family's own -> values with which nothing changes, and others.
METADATA: list[tuple[str, str, tuple, tuple]] = [
    ("llama", "attention.causal", (True,), (False,)),
    ("llama", "attention.scale", (0.0,), (0.5,)),
    ("llama", "attention.clamp_kqv", (0.0,), (8.0,)),
    ("llama", "attention.temperature_length", (0,), (8192,)),
    ("llama", "attention.temperature_scale", (0.0,), (0.1,)),
    ("llama", "attention.q_lora_rank", (0,), (16,)),
    ("llama", "attention.key_length_swa", (8,), (16,)),
    ("llama", "logit_scale", (1.0,), (0.25,)),
    ("llama", "pooling_type", (0, 3), ()),
    ("llama", "tensor_data_layout", ("Meta AI original pth",), ()),
    ("llama", "something_new", (0, False, ""), (1, True, "x", [2, 4])),
    ("mixtral", "expert_weights_norm", (True,), (False,)),
    ("mixtral", "expert_weights_scale", (1.0,), (2.5,)),
    ("mixtral", "expert_gating_func", (1,), (2,)),
    ("mixtral", "expert_group_count", (1,), (2,)),
    ("mixtral", "expert_shared_count", (0,), (1,)),
    ("qwen3_moe", "leading_dense_block_count", (0,), (1,)),
    ("qwen3_moe", "nextn_predict_layers", (0,), (1,)),
    ("qwen2", "attention.sliding_window", (0, 64, 4096), (8,)),
    ("qwen2", "rope.dimension_sections", (), ([4, 4, 0, 0],)),
    ("qwen2", "rope.freq_base_swa", (1e6,), (1e4,)),
    ("gemma3", "rope.freq_base_swa", (1e4,), ()),
    ("llama", "rope.scaling.attn_factor", (1.0,), (1.5,)),
    ("llama_linear", "rope.scaling.attn_factor", (1.0,), (1.5,)),
    ("llama_yarn", "rope.scaling.yarn_ext_factor", (1.0,), (0.5,)),
    ("llama_yarn", "rope.scaling.yarn_attn_factor", (1.0,), (0.5,)),
    ("llama_yarn", "rope.scaling.yarn_beta_fast", (32.0,), (4.0,)),
    ("llama_yarn", "rope.scaling.yarn_beta_slow", (1.0,), (0.5,)),
    ("llama_yarn", "rope.scaling.yarn_log_multiplier", (0.0,), (0.1,)),
    ("llama_yarn", "rope.scaling.alpha", (0.0,), (2.0,)),
    ("llama_llama3", "rope.scaling.factor", (1.0,), (4.0,)),
]


@pytest.mark.parametrize("name, key, same, other", METADATA, ids=lambda value: value if isinstance(value, str) else "")
def test_metadata_change_nothing_or_are_refused_by_name(name, key, same, other, tmp_path):
    path, changed = write(tmp_path / "good.gguf", name), tmp_path / "changed.gguf"
    arch = gguf_names.of_config(cases.CASES[name]).arch
    for value in same:
        assert (
            open_gguf(copy(path, changed, values={"general.architecture": arch, f"{arch}.{key}": value})).config
            == open_gguf(path).config
        )
    for value in other:
        with one_line(rf"{arch}\.{key.rpartition('.')[0]}"):
            open_gguf(copy(path, changed, values={"general.architecture": arch, f"{arch}.{key}": value}))


def test_a_factor_without_a_kind_is_linear_as_in_llama_cpp(tmp_path):
    path, changed = write(tmp_path / "good.gguf"), tmp_path / "changed.gguf"
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        config = open_gguf(copy(path, changed, values={key: 4.0})).config
        assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    values = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}  # it never scales then
    assert open_gguf(copy(path, changed, values=values)).config == open_gguf(path).config


LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[2.0] * 4)


@pytest.mark.parametrize(
    "name, changes, match",
    [
        ("llama", {"model_type": "gptj"}, "'gptj' has no GGUF form here"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act of the llama model is 'gelu'"),
        ("llama", {"rms_norm_eps": None}, "has no rms_norm_eps"),
        ("llama", {"rope_parameters": LONG | {"original_max_position_embeddings": 16}}, "'longrope' of a llama model"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            r"Rope.factor .1.0. must be above 1 with linear scaling",
        ),
        ("llama", {"num_hidden_layers": 0}, "num_layers is num_hidden_layers"),
        ("llama", {"vocab_size": 300}, "must be above the tokenizer's last id"),
        (
            "llama_yarn",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0}},
            "beta_fast of the yarn",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias of the qwen3 model is True"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob of the qwen3_moe model is False"),
        ("gemma2", {"query_pre_attn_scalar": 8}, "query_pre_attn_scalar of the gemma2 model is 8, llama.cpp computes"),
    ],
)
def test_models_without_a_gguf_form(name, changes, match, tmp_path):
    with one_line(match):
        write(tmp_path / "model.gguf", name, **changes)
    assert not [*tmp_path.iterdir()]


def test_tensors_that_do_not_fit(tmp_path):
    config, path = config_of("llama"), tmp_path / "model.gguf"
    path.write_bytes(b"before")
    values = dict(cases.tensors(config))
    first, norm = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    for match, changed, dtype in (
        ("model.norm.weight is missing", {key: value for key, value in values.items() if key != norm}, "f32"),
        ("tensor model.extra.weight is unknown", values | {"model.extra.weight": values[norm]}, "f32"),
        ("must have .64, 32. by config.json", values | {first: values[first].T}, "f32"),
        ("F16 cannot hold them", values | {first: values[first] * 1e6}, "f16"),
        ("Q8_0 cannot hold them", values | {first: values[first] * np.float32(np.nan)}, "q8_0"),
        ("dtype 'q5_k' is not supported", values, "q5_k"),
    ):
        with one_line(match):
            write_gguf(path, config, changed.items(), cases.byte_level(), dtype=dtype)
        assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == b"before"
    with one_line("came twice"):
        write_gguf(path, config, [(norm, values[norm])] * 2, cases.byte_level())
    with one_line("cannot be written"):
        write_gguf(path / "in_a_file.gguf", config, values.items(), cases.byte_level())


def test_tokenizers_without_a_gguf_form(tmp_path):
    for match, change in (
        ("has a Unigram model", {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}),
        ("prepares text by Lowercase", {"pre_tokenizer": None, "normalizer": {"type": "Lowercase"}}),
        ("a normalizer Lowercase", {"normalizer": {"type": "Lowercase"}}),
        (
            "splits by .*Whitespace",
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Whitespace"},
                        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                    ],
                }
            },
        ),
    ):
        files = dict(cases.byte_level())
        files["tokenizer.json"] = json.dumps(json.loads(files["tokenizer.json"]) | change).encode()
        with one_line(match):
            write(tmp_path / "model.gguf", tokenizer=files)


@pytest.fixture
def llama_cpp():
    """A file -> llama.cpp with that file, in its own process."""
    pytest.importorskip("xllamacpp")
    from gguf_files import LlamaCpp

    return lambda path: LlamaCpp(sys.executable, path)


def our_model(found: GgufModel):
    """Our model of a file, and its parameters."""
    from capibara.interop import open_model

    model = api.build(hf_config.from_hf(found.config, dtype="float32"))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return model, open_model.load_params(found, model, jax.tree.map(lambda _: here, model.abstract_params))


def our_logits(found: GgufModel, ids: list[int]) -> np.ndarray:
    """Our model's logits [T, V] in float32, with the weights of a file."""
    model, params = our_model(found)
    tokens = np.array([ids], np.int32)
    positions = np.arange(len(ids), dtype=np.int32)[None]
    batch = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    return np.asarray(jax.jit(model.logits)(params, batch))[0]


@pytest.mark.heavy
@pytest.mark.parametrize("name", cases.CASES)
def test_a_file_is_the_same_after_it_was_our_model(name, tmp_path):
    from capibara.interop import open_model

    path, again = write(tmp_path / "model.gguf", name), tmp_path / "again.gguf"
    found = open_gguf(path)
    model, params = our_model(found)
    config = hf_config.to_hf(model.config, found.config)
    write_gguf(again, config, open_model.hf_tensors(params, model, config["model_type"]), found.tokenizer, dtype="f32")
    assert again.read_bytes() == path.read_bytes()


def compute_as_ggml(monkeypatch):
    """As ggml computes many sparse layers: the deviation over one unit fewer, and GELU from a float16 table."""
    normal, gate, gelu = statistics.NormalDist(), parts.gate, jax.nn.gelu

    def of_fewer(sparsity, width, gate_BTF):
        units = gate_BTF.shape[-1]
        share = normal.cdf(normal.inv_cdf(sparsity) * (units / (units - 1)) ** 0.5) if sparsity else 0
        return gate(share, width, gate_BTF)

    def of_table(x, approximate=True):
        within = gelu(x.astype(jnp.float16).astype(jnp.float32), approximate=approximate).astype(jnp.float16)
        return jnp.where(x <= -10, 0, jnp.where(x >= 10, x, within.astype(jnp.float32)))

    monkeypatch.setattr(parts, "gate", of_fewer)
    monkeypatch.setattr(jax.nn, "gelu", of_table)


@pytest.mark.heavy
@pytest.mark.parametrize("name", cases.CASES)
def test_llama_cpp_goes_on_as_we_do(name, llama_cpp, tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf", name)
    prompt = [int(i) for i in np.random.default_rng(0).integers(2, 300, 12)]
    with llama_cpp(path) as peer:
        theirs = peer.ask("continue", ids=prompt, count=24)["ids"]
        best = peer.ask("continue", ids=prompt, count=1, best=cases.VOCAB)["best"]
    found = open_gguf(path)
    if name == "gpt_oss_yarn":  # llama.cpp rounds YaRN's bounds, which gpt-oss does not
        found.config["rope_parameters"] |= {"truncate": True}
        del found.config["rope_scaling"]  # the same for transformers 4
    if name == "gemma3n":
        compute_as_ggml(monkeypatch)
    logits = our_logits(found, prompt + theirs)
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == theirs
    # ggml reads GELU's tanh from a table in float16.
    tolerance = 2e-2 if name.startswith(("gemma", "gpt")) else 1e-4
    ours = np.asarray(jax.nn.log_softmax(logits[len(prompt) - 1]))
    for token, log_probability in best[0] if best else ():  # empty where the token is a part of a character
        assert abs(ours[token] - log_probability) < tolerance


@pytest.mark.heavy
def test_llama_cpp_tokenizes_as_a_sentencepiece_model_does(llama_cpp, tmp_path):
    data = cases.sentencepiece_model()
    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    with llama_cpp(write(tmp_path / "model.gguf", tokenizer={"tokenizer.model": data}, vocab_size=432)) as peer:
        for text in (*TEXTS[:4], *(cases.TEXT[i : i + 97] for i in range(0, 6000, 97))):
            assert peer.ask("tokenize", text=text)["ids"] == model.encode(text), text


@pytest.mark.heavy
@pytest.mark.parametrize("name", [*TOKENIZERS, *OTHER_WORDS])
def test_llama_cpp_tokenizes_as_the_tokenizer_does(name, llama_cpp, tmp_path):
    files = OTHER_WORDS[name] if name in OTHER_WORDS else TOKENIZERS[name]()
    with llama_cpp(write(tmp_path / "model.gguf", tokenizer=files)) as peer:
        for text in (*TEXTS, *(cases.TEXT[i : i + 97] for i in range(0, 6000, 97))):
            assert peer.ask("tokenize", text=text)["ids"] == encode(files, text), text
