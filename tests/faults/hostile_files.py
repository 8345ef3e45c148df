"""Makes a folder of hostile files: archives that unpack to far more, headers that lie, names that lead out, code.

Whatever a reader of ours could run would make a file at CANARY, whose path each writes in.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import io
import json
import os
import pathlib
import pickle
import shutil
import socket
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable

import hostile_indices
import hostile_inputs
import jax
import msgpack
import numpy as np
from safetensors.numpy import save

from capibara.interop import open_model
from capibara.interop.gguf import write as gguf_write
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.interop.hf import torch_file
from capibara.interop.t5x import write as t5x_write
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig

SIZES = dict(vocab_size=384, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=64, dtype="float32")
LLAMA = DecoderConfig(**SIZES, num_kv_heads=2, norm_eps=1e-5, head="separate")
T5 = EncoderDecoderConfig(**SIZES, activation="geglu", head="separate")
DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
TINY = """
Trainer.model = @DecoderConfig()
DecoderConfig.vocab_size = 384
DecoderConfig.embed_dim = 32
DecoderConfig.num_layers = 2
DecoderConfig.num_heads = 4
DecoderConfig.num_kv_heads = 2
DecoderConfig.mlp_dim = 64
DecoderConfig.norm_eps = 1e-5
DecoderConfig.head = "separate"
DecoderConfig.dtype = "float32"
Trainer.steps = 1
Trainer.plan = @Plan()
Plan.batch_size = 8  # for eight devices, too
Trainer.optimizer = @Optimizer()
Trainer.dataset = @Dataset()
Dataset.length = 16
Dataset.source = @JsonlSource()
JsonlSource.files = ("{folder}/words.jsonl",)
Dataset.vocabulary = @TokenizerJsonVocabulary()
TokenizerJsonVocabulary.path = "{folder}/hf"
"""
PROMPT = '{"prompt": "hi", "completion": "ho", "text": "hello there", "question": "why?", "answer": ["so"]}\n'


@dataclasses.dataclass(frozen=True)
class Case:
    """A hostile thing.

    Attributes:
      name: what it is.
      kind: how verbs open it: model, run, adapter, index, lines, archive, table or input (of builders of data sets).
      path: where it is.
      refused: whether every verb must refuse it with exit code 2 (of builders also 3); False: it may also do no harm.
      good: records in it that builders must not lose.
    """

    name: str
    kind: str
    path: str
    refused: bool = True
    good: int = 0


def make(folder: pathlib.Path, canary: pathlib.Path, *, large: bool = True) -> list[Case]:
    """Writes all of them; returns what there is.

    Args:
      canary: what is there once something was executed.
      large: those of many megabytes too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    maker = _Maker(folder, canary, large)
    (maker.good / "words.jsonl").write_text("".join(json.dumps({"text": f"a text of {i}"}) + "\n" for i in range(50)))
    (maker.good / "tiny.gin").write_text(TINY.format(folder=maker.good))
    for name in ("hf", "model.gguf", "t5x"):  # what is not hostile is opened
        maker.add(f"good: {name}", "t5x" if name == "t5x" else "model", maker.good / name, refused=False)
    for group in (
        _configs,
        _indexes,
        _tensors,
        _quantized,
        _torch,
        _ggufs,
        _tokenizers,
        _sentencepiece,
        _t5x,
        _t5x_arrays,
    ):
        group(maker)
    for group in (_code, _odd_files, _adapters, _lines, _archives, _templates):
        group(maker)
    for name, path in hostile_indices.make(folder / "indices", str(maker.good / "hf"), canary).items():
        maker.add(
            f"retrieval index: {name}" if name != "good" else "good: retrieval index",
            "index",
            path,
            refused=name != "good",
        )
    for one in hostile_inputs.make(folder / "inputs", large=large):
        maker.cases.append(Case(f"input: {one.name}", "input", one.path, not one.harmless, one.good))
    names = [case.name for case in maker.cases]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    return maker.cases


class _Maker:
    def __init__(self, folder: pathlib.Path, canary: pathlib.Path, large: bool):
        self.folder, self.canary, self.large, self.cases = folder, canary, large, []
        rng = np.random.default_rng(0)
        self.good = folder / "good"
        self.good.mkdir(parents=True)
        for name, config in (("hf", LLAMA), ("t5", T5)):
            model = api.build(config)
            params = jax.tree.map(lambda s: 0.1 * rng.standard_normal(s.shape, np.float32), model.abstract_params)
            values = hf_config.to_hf(config, {"max_position_embeddings": 64})
            shapes = open_model.hf_shapes(model, values["model_type"])
            tensors = dict(open_model.hf_tensors(params, model, values["model_type"]))
            if name == "t5":
                t5x_write.save_t5x(str(self.good / "t5x"), values, shapes, tensors.items(), {}, dtype="float32")
                continue
            files = tokenizer_files()
            hf_folder.save_hf(str(self.good / "hf"), values, shapes, tensors.items(), files, dtype="float32")
            self.values, self.shapes, self.tensors = values, shapes, tensors
            gguf_write.write_gguf(str(self.good / "model.gguf"), values, iter(tensors.items()), files, dtype="f32")

    def add(self, name: str, kind: str, path: pathlib.Path | str, refused: bool = True) -> None:
        self.cases.append(Case(name, kind, str(path), refused))

    def hf(self, name: str, refused: bool = True, **files: bytes | None) -> pathlib.Path:
        """A good folder with other files; keys have __ for a dot, - is not needed; None: without it."""
        path = self.copy("hf", name)
        for key, content in files.items():
            file = path / key.replace("__", ".")
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_bytes(content)
        self.add(name, "model", path, refused)
        return path

    def copy(self, of: str, name: str) -> pathlib.Path:
        path = self.folder / name.replace(" ", "_").replace("/", "_")
        shutil.copytree(self.good / of, path)
        return path


def tokenizer_files() -> dict[str, bytes]:
    """A byte-level tokenizer of 256 tokens and the end token."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate([*letters, "th"])}, merges=[("t", "h")])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    about = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    return {"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": json.dumps(about).encode()}


def _configs(maker: _Maker) -> None:
    changes = {
        "1e9 layers": {"num_hidden_layers": 10**9},
        "4000 layers": {"num_hidden_layers": 4000},
        "negative sizes": {"hidden_size": -32},
        "vocabulary of 1e12": {"vocab_size": 10**12},
        "a string for a size": {"hidden_size": "32"},
        "a size of 1000 digits": {"intermediate_size": 10**1000},
        "heads of 0": {"num_attention_heads": 0},
        "an object for a number": {"rope_theta": {"a": 1}},
        "a list for the model type": {"model_type": ["llama"]},
        "architectures that are an object": {"architectures": {"a": 1}},
        "a scaling of strings": {"rope_parameters": None, "rope_scaling": {"rope_type": "yarn", "factor": "x"}},
        "2e9 positions": {"max_position_embeddings": 2**40},
        "experts in a layer without": {"model_type": "mixtral", "architectures": None, "num_local_experts": 2**14},
        "layers of 1e6 kinds": {"model_type": "qwen3", "architectures": None, "use_sliding_window": True,
                                "layer_types": ["sliding_attention"] * 10**6},
    }  # fmt: skip
    for name, change in changes.items():
        values = maker.values | change
        maker.hf(f"config: {name}", config__json=json.dumps(values).encode())
    raw = {
        "nested 100,000 deep": DEEP,
        "a number of 1e6 digits": b'{"hidden_size": ' + b"9" * 10**6 + b"}",
        "infinity": json.dumps(maker.values).replace("1e-05", "1e999").encode(),
        "NaN": json.dumps(maker.values | {"rms_norm_eps": float("nan")}).encode(),
        "empty": b"",
        "cut": json.dumps(maker.values).encode()[:90],
        "no UTF-8": b'{"a": "\xff\xfe"}',
        "a list": b"[]",
    }
    for name, content in raw.items():
        maker.hf(f"config: {name}", config__json=content)


def _indexes(maker: _Maker) -> None:
    secret = maker.folder / "secret.safetensors"
    shutil.copy(maker.good / "hf" / "model.safetensors", secret)
    for name, file in {
        "leads out": f"../{secret.name}", "is absolute": str(secret), "of a device": "/dev/zero", "has a NUL": "a\0b",
    }.items():  # fmt: skip
        index = {"weight_map": dict.fromkeys(maker.shapes, file)}
        content = json.dumps(index).encode()
        maker.hf(f"index: {name}", model__safetensors=None, **{"model__safetensors__index__json": content})
    many = {"weight_map": {f"t{i}": f"f{i}.safetensors" for i in range(20_000)}}
    maker.hf("index: of 20,000 files", **{"model__safetensors__index__json": json.dumps(many).encode()})
    maker.hf("index: nested deep", **{"model__safetensors__index__json": DEEP})
    loop = maker.hf("a link to itself", model__safetensors=None)
    (loop / "model.safetensors").symlink_to("model.safetensors")


def safetensors(header: dict | bytes, data: bytes = b"") -> bytes:
    """A file with a header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _tensors(maker: _Maker) -> None:
    content = (maker.good / "hf" / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    header.pop("__metadata__", None)
    first, second = list(header)[:2]
    changes = {
        "header of 2**60 bytes": struct.pack("<Q", 2**60) + b"{}",
        "overlapping": safetensors(
            header | {second: header[second] | {"data_offsets": header[first]["data_offsets"]}}, data
        ),
        "out of range": safetensors(header | {second: header[second] | {"data_offsets": [0, 2**62]}}, data),
        "a shape that lies": safetensors(header | {first: header[first] | {"shape": [2**31, 2**31]}}, data),
        "a shape that overflows": safetensors(header | {first: header[first] | {"shape": [2**33, 2**33, 0]}}, data),
        "negative": safetensors(header | {first: header[first] | {"shape": [-1, 4]}}, data),
        "nested deep": safetensors(DEEP),
        "names without end": safetensors({"a" * 10**6: header[first]}, data),
        "empty": b"",
        "cut": content[:-100],
    }
    for name, changed in changes.items():
        maker.hf(f"safetensors: {name}", model__safetensors=changed)


def _quantized(maker: _Maker) -> None:
    """Weights in 4 bits whose parts say more than there is."""
    config = json.loads((maker.good / "hf" / "config.json").read_bytes())
    name = next(one for one in maker.tensors if one.endswith("q_proj.weight"))
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [2**31, 2**31]}
    mark, base = f"{name}.quant_state.bitsandbytes__nf4", name.removesuffix(".weight")
    raw = lambda said: np.frombuffer(said, np.uint8)  # noqa: E731
    codes = {f"{base}.qweight": np.zeros((4, 32), np.int32), f"{base}.qzeros": np.zeros((1, 4), np.int32)}
    codes |= {f"{base}.scales": np.ones((1, 32), np.float16), f"{base}.g_idx": np.full(32, 2**31 - 1, np.int32)}
    packed = {f"{name}_packed": np.zeros((32, 4), np.int32), f"{name}_scale": np.ones((32, 1), np.float32)}
    cases = {
        "4 bits of 2**62 values": ("bitsandbytes", {mark: raw(json.dumps(state).encode())}),
        "a state nested deep": ("bitsandbytes", {mark: raw(DEEP[:60000])}),
        "groups that are not there": ("gptq", codes),
        "no method": ({"a": ["b"]}, {}),
        "packed codes of 2**62 values": (_packed(["Linear"]), packed | {f"{name}_shape": np.array([2**31, 2**31])}),
        "a pattern without end": (_packed(["re:(a+)+$"]), packed),
        "more patterns than modules": (_packed([f"re:{number}" for number in range(10**5)]), packed),
        "blocks of one value": (
            {"quant_method": "fp8", "weight_block_size": [1, 1]},
            {f"{name}_scale_inv": packed[f"{name}_scale"]},
        ),
    }
    for what, (method, parts) in cases.items():
        about = (
            method if isinstance(method, dict) else {"quant_method": method} | ({"bits": 4} if method == "gptq" else {})
        )
        tensors = {one: value for one, value in maker.tensors.items() if one != name or not parts}
        content = save({**tensors, **({name: raw(bytes(64))} if method == "bitsandbytes" else {}), **parts})
        changed = json.dumps(config | {"quantization_config": about}).encode()
        maker.hf(f"quantized: {what}", model__safetensors=content, config__json=changed)


def _packed(targets: list[str]) -> dict[str, object]:
    """A quantization_config of compressed-tensors."""
    weights = {"num_bits": 4, "type": "int", "strategy": "channel"}
    groups = {"a": {"targets": targets, "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


class _Runs:
    """What a pickle would run."""

    def __init__(self, call: Callable, *arguments: object):
        self._call, self._arguments = call, arguments

    def __reduce__(self) -> tuple:
        return self._call, self._arguments


def _zip(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def _torch(maker: _Maker) -> None:
    touch = f"touch {maker.canary}"
    nested = b"\x80\x02)" + b"\x86".join(b"q%b" % bytes([i]) + b"h%b" % bytes([i]) for i in range(60)) + b"\x86"
    good = maker.folder / "good.bin"
    torch_file.save_torch(str(good), maker.tensors, {})
    with zipfile.ZipFile(good) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    lying = next(name for name in members if name.endswith("data/0"))
    files = {
        "os.system": _zip({"archive/data.pkl": pickle.dumps({"a": _Runs(os.system, touch)}, protocol=2)}),
        "eval, legacy": pickle.dumps({"a": _Runs(eval, f"open({str(maker.canary)!r}, 'w')")}, protocol=2),
        "a key whose hash takes 2**60 steps": _zip({"archive/data.pkl": b"\x80\x02}" + nested[2:] + b"K\x01s."}),
        "a memo of 2**31 values": _zip({"archive/data.pkl": b"\x80\x02}r\xff\xff\xff\x7f."}),
        "nested 1e6 deep": _zip({"archive/data.pkl": b"\x80\x02" + b"(" * 10**6 + b"t" * 10**6 + b"."}),
        "a bomb of 1 GB": _bomb(maker.large),
        "a storage that unpacks to more": _zip(members | {lying: bytes(64 << 20)}, zipfile.ZIP_DEFLATED),
        "a text of 2**60 bytes": _zip({"archive/data.pkl": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"a."}),
        "a directory of 2**32 bytes": b"PK\x03\x04"
        + b"PK\x05\x06"
        + struct.pack("<HHHHIIH", 0, 0, 9, 9, 2**32 - 2, 0, 0),
        "empty": b"",
    }
    for name, content in files.items():
        maker.hf(f"torch: {name}", model__safetensors=None, pytorch_model__bin=content)


def _bomb(large: bool) -> bytes:
    """A zip archive whose index says a small size and unpacks to much more than it needs."""
    return _zip({"archive/data.pkl": bytes((1 << 30) if large else (96 << 20))}, zipfile.ZIP_DEFLATED)


def _gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf(
    keys: list[tuple[bytes, int, bytes]] = (), tensors: list[tuple] = (), *, counts: tuple = (), data: bytes = b""
) -> bytes:
    """A file of keys (name, type, bytes of the value) and tensors (name, dims, type, offset)."""
    out = b"GGUF" + struct.pack("<I", 3) + struct.pack("<QQ", *(counts or (len(tensors), len(keys))))
    out += b"".join(_gguf_text(name) + struct.pack("<I", kind) + value for name, kind, value in keys)
    for name, dims, kind, offset in tensors:
        out += _gguf_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return out + bytes(-len(out) % 32) + data


def _ggufs(maker: _Maker) -> None:
    arch, llama = (b"general.architecture", 8, _gguf_text(b"llama")), struct.pack("<I", 9)
    array = lambda kind, count, rest=b"": struct.pack("<IQ", kind, count) + rest  # noqa: E731
    good = (maker.good / "model.gguf").read_bytes()
    layers = good.index(b"llama.block_count") + len(b"llama.block_count") + 4
    files = {
        "2**63 keys": gguf(counts=(0, 2**63)),
        "2**63 tensors": gguf([arch], counts=(2**63, 1)),
        "a text of 2**60 bytes": gguf([(b"a", 8, struct.pack("<Q", 2**60))]),
        "arrays in arrays": gguf([(b"a", 9, llama[:0] + array(9, 1) * 100_000 + array(0, 0))]),
        "an array of 2**61": gguf([(b"a", 9, array(12, 2**61))]),
        "an array of 5e6 empty texts": gguf(
            [(b"a", 9, array(8, 5_000_000, bytes(8 * 5_000_000 if maker.large else 8)))]
        ),
        "alignment 0": gguf(
            [arch, (b"general.alignment", 4, struct.pack("<I", 0))], [(b"a", (4,), 0, 0)], data=bytes(64)
        ),
        "sizes whose product overflows": gguf([arch], [(b"a", (2**33, 2**33), 0, 0)], data=bytes(64)),
        "an offset outside": gguf([arch], [(b"a", (4,), 0, 2**60)], data=bytes(64)),
        "overlapping tensors": gguf([arch], [(b"a", (8,), 0, 0), (b"b", (8,), 0, 0)], data=bytes(64)),
        "200 dimensions": gguf([arch], [(b"a", (1,) * 200, 0, 0)], data=bytes(64)),
        "a type of 99": gguf([arch], [(b"a", (8,), 99, 0)], data=bytes(64)),
        "2**31 layers": good[:layers] + struct.pack("<I", 2**31) + good[layers + 4 :],
        "cut": good[: len(good) // 2],
        "empty": b"",
    }
    for name, content in files.items():
        path = maker.folder / f"{name.replace(' ', '_')}.gguf"
        path.write_bytes(content)
        maker.add(f"gguf: {name}", "model", path)


def _tokenizers(maker: _Maker) -> None:
    good = json.loads(tokenizer_files()["tokenizer.json"])
    split = lambda regex: {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}  # noqa: E731
    doubling = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 30
    table = base64.b64encode(b"\x08\0\0\0" + b"\xff" * 8 + b"abc\0").decode()
    changes = {
        "a pattern of exponential time": {"pre_tokenizer": split("(a+)+$")},
        "a pattern of alternatives": {"pre_tokenizer": split("(a|a|b)*c")},
        "a pattern that refers back": {"pre_tokenizer": split(r"(.*)(.*)\1\2x")},
        "a pattern of many repeats": {"pre_tokenizer": split("a*" * 30 + "b")},
        "a pattern that is none": {"pre_tokenizer": split("(((")},
        "a normalizer that doubles 30 times": {"normalizer": {"type": "Sequence", "normalizers": doubling}},
        "a normalizer of a hostile table": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": table}},
        "an id of 2**32 - 1": {"model": good["model"] | {"vocab": good["model"]["vocab"] | {"zz": 2**32 - 1}}},
        "merges of nothing": {"model": good["model"] | {"merges": [["no", "such"]]}},
        "no model": {"model": None},
    }
    for name, change in changes.items():
        maker.hf(f"tokenizer: {name}", tokenizer__json=json.dumps(good | change).encode())
    maker.hf("tokenizer: nested deep", tokenizer__json=DEEP)
    maker.hf("tokenizer: empty", tokenizer__json=b"")
    maker.hf("tokenizer: a config nested deep", tokenizer_config__json=DEEP)


def _sentencepiece(maker: _Maker) -> None:
    for name, content in {
        "of noise": os.urandom(5000),
        "empty": b"",
        "cut": b"\x0a\xff\xff\xff\xff\x0f" + b"a" * 100,
    }.items():
        maker.hf(f"sentencepiece: {name}", tokenizer__json=None, tokenizer_config__json=None, tokenizer__model=content)


def _t5x(maker: _Maker) -> None:
    good = (maker.good / "t5x" / "checkpoint_0" / "checkpoint").read_bytes()
    tree = msgpack.unpackb(good, strict_map_key=False)

    def with_path(path: str) -> bytes:
        changed = msgpack.unpackb(good, strict_map_key=False)
        changed["optimizer"]["target"]["token_embedder"]["embedding"]["kvstore"]["path"] = path
        return msgpack.packb(changed)

    array = lambda shape, kind: msgpack.ExtType(1, msgpack.packb((shape, kind, b"1234")))  # noqa: E731
    lying = tree["optimizer"]["target"] | {"token_embedder": {"embedding": array([2**40, 2**40], "float32")}}
    files = {
        "lists of 2**32": b"\x81\xa6target" + b"\xdd\xff\xff\xff\xff" * 500,
        "nested 100,000 deep": b"\x81\xa6target" + b"\x81\xa1a" * 100_000 + b"\xc0",
        "2e6 empty objects": b"\x81\xa6target\xdd" + struct.pack(">I", 2_000_000) + b"\x80" * 2_000_000,
        "an array that lies": msgpack.packb({"target": lying}),
        "a path that leads out": with_path("../../good/t5x/checkpoint_0/target.token_embedder.embedding"),
        "an absolute path": with_path("/etc"),
        "a path in a bucket": with_path("gs://bucket/a"),
        "cut": good[:-50],
        "empty": b"",
    }
    for name, content in files.items():
        path = maker.copy("t5x", f"t5x: {name}")
        (path / "checkpoint_0" / "checkpoint").write_bytes(content)
        maker.add(f"t5x: {name}", "t5x", path)
    gin = (maker.good / "t5x" / "config.gin").read_text()
    secret = maker.folder / "secret.model"
    secret.write_bytes(b"a secret")
    texts = {
        "a vocabulary outside": f"seqio.SentencePieceVocabulary.sentencepiece_model_file = {str(secret)!r}\n",
        "imports": f"import os\nos.system.command = 'touch {maker.canary}'\n",
        "an expression nested deep": "A = " + "-" * 100_000 + "1\nB = " + "(" * 100_000 + "\n",
        "a line of 1 MB": "a." * 500_000 + "\n",
        "1e9 layers": "network.T5Config:\n  num_encoder_layers = 1000000000\n",
    }
    for name, text in texts.items():
        path = maker.copy("t5x", f"t5x gin: {name}")
        (path / "config.gin").write_text(f"{gin}\n{text}")
        maker.add(f"t5x gin: {name}", "t5x", path, refused=name == "1e9 layers")


def _t5x_arrays(maker: _Maker) -> None:
    name = "target.token_embedder.embedding"
    about = json.loads((maker.good / "t5x" / "checkpoint_0" / name / ".zarray").read_text())
    changes = {
        "1e9 chunks": about | {"shape": [10**9, 32], "chunks": [1, 32]},
        "a chunk of 1 TB": about | {"shape": [2**20, 2**18], "chunks": [2**20, 2**18]},
        "sizes that are strings": about | {"shape": ["384", 32]},
        "nested deep": None,
    }
    for what, changed in changes.items():
        path = maker.copy("t5x", f"zarr: {what}")
        content = DEEP if changed is None else json.dumps(changed).encode()
        (path / "checkpoint_0" / name / ".zarray").write_bytes(content)
        maker.add(f"zarr: {what}", "t5x", path)
    path = maker.copy("t5x", "zarr: a chunk that unpacks to 2 GB")
    chunks = sorted(file for file in (path / "checkpoint_0" / name).iterdir() if file.name[0].isdigit())
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = bytes(16 << 20)
    chunks[0].write_bytes(b"".join(packer.compress(block) for _ in range(128 if maker.large else 8)) + packer.flush())
    maker.add("zarr: a chunk that unpacks to 2 GB", "t5x", path)
    store = maker.folder / "ocdbt_noise"
    store.mkdir()
    (store / "manifest.ocdbt").write_bytes(os.urandom(2000))
    maker.add("ocdbt: noise", "t5x", store)


def _code(maker: _Maker) -> None:
    """A config.gin that would run something, alone and beside a config.json."""
    touch = f"open({str(maker.canary)!r}, 'w')"
    module = maker.folder / "hostile_module.py"
    module.write_text(f"{touch}\n")
    texts = {
        "import": "import hostile_module\n",
        "dynamic registration": "from __gin__ import dynamic_registration\nimport os\nA = @os.getcwd()\n",
        "include": f"include {str(module)!r}\n",
        "a reference": "Trainer.model = @os.system()\n",
    }
    for name, text in texts.items():
        path = maker.folder / f"run_{name.replace(' ', '_')}"
        path.mkdir()
        (path / "config.gin").write_text(text)
        (path / "checkpoints").mkdir()
        shutil.copy(module, path)
        maker.add(f"run: {name}", "run", path)
        maker.hf(
            f"beside config.json: {name}",
            refused=False,
            config__gin=text.encode(),
            hostile_module__py=module.read_bytes(),
        )


def _odd_files(maker: _Maker) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        path = maker.hf(f"a pipe for {name}")
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)
    path = maker.hf("a folder for config.json", config__json=None)
    (path / "config.json").mkdir()
    path = maker.hf("a device for tokenizer_config.json", tokenizer_config__json=None)
    (path / "tokenizer_config.json").symlink_to("/dev/zero")
    path = maker.hf("a secret for a chat template")
    (path / "chat_template.jinja").symlink_to(maker.folder / "secret.model")
    path = maker.hf("a socket for the weights", model__safetensors=None)
    with socket.socket(socket.AF_UNIX) as one:
        here = os.open(path, os.O_RDONLY)
        one.bind(f"/proc/self/fd/{here}/model.safetensors")
        os.close(here)


def _adapters(maker: _Maker) -> None:
    good = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    good["base_model_name_or_path"] = str(maker.good / "hf")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    weights = safetensors({name: {"dtype": "F32", "shape": [4, 32], "data_offsets": [0, 512]}}, bytes(512))
    cases = {
        "a pattern of exponential time": (good | {"alpha_pattern": {"(a+)+$": 8}}, weights),
        "targets of exponential time": (good | {"target_modules": "(a+)+$"}, weights),
        "layers of exponential time": (good | {"layers_to_transform": [0], "layers_pattern": "(a+)+$"}, weights),
        "layers without end": (good | {"layer_replication": [[0, 2**30]] * 4000}, weights),
        "blocks without end": (good | {"use_bdlora": {"target_modules_bd_a": ["q"], "nblocks": 2**30}}, weights),
        "a rank of 1e12": (good | {"r": 10**12}, weights),
        "an alpha of 1e400": (good | {"lora_alpha": 10**400}, weights),
        "a rank of 2**30 in no bytes": (
            good,
            safetensors({name: {"dtype": "F32", "shape": [2**30, 0], "data_offsets": [0, 0]}}),
        ),
        "a dtype of 8 bits": (good, safetensors({name: {"dtype": "F8_E4M3", "shape": [4, 32], "data_offsets": [0, 128]}}, bytes(128))),
        "a base that is a pipe": (good | {"base_model_name_or_path": str(maker.folder / "pipe")}, weights),
        "its own base": (good | {"base_model_name_or_path": str(maker.folder / "adapter_its_own_base")}, weights),
    }  # fmt: skip
    os.mkfifo(maker.folder / "pipe")
    for what, (config, content) in cases.items():
        path = maker.folder / f"adapter_{what.replace(' ', '_')}"
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps(config))
        (path / "adapter_model.safetensors").write_bytes(content)
        maker.add(f"adapter: {what}", "adapter", path)


def _lines(maker: _Maker) -> None:
    size = 100_000_000 if maker.large else 40_000_000
    files = {
        "a line of 100 MB": PROMPT.encode() + b'{"text": "' + b"a" * size + b'"}\n',
        "a line nested deep": PROMPT.encode() + DEEP + b"\n",
        "a number of 1e6 digits": PROMPT.encode() + b'{"text": ' + b"9" * 10**6 + b"}\n",
        "a line of 2e6 values": PROMPT.encode() + b'{"text": [' + b"[]," * 2_000_000 + b"1]}\n",
        "no UTF-8": PROMPT.encode() + b'{"text": "\xff\xfe", "prompt": "\xff"}\n',
        "a NUL": PROMPT.encode() + b'\0\0\0\0{"text"}\n',
        "only line ends": b"\n" * (size // 2),
        "empty": b"",
    }
    for name, content in files.items():
        path = maker.folder / f"{name.replace(' ', '_')}.jsonl"
        path.write_bytes(content)
        maker.add(f"lines: {name}", "lines", path, refused=name not in ("no UTF-8",))
    os.mkfifo(maker.folder / "pipe.jsonl")
    maker.add("lines: a pipe", "lines", maker.folder / "pipe.jsonl")
    table = maker.folder / "table.parquet"
    table.write_bytes(b"PAR1" + os.urandom(3000) + struct.pack("<I", 2**31 - 1) + b"PAR1")
    maker.add("table: parquet of noise", "table", table)


def _archives(maker: _Maker) -> None:
    zeros = bytes(8 << 20)
    times = 256 if maker.large else 16
    bomb = io.BytesIO()
    with tarfile.open(fileobj=bomb, mode="w") as archive:
        info = tarfile.TarInfo("a.jsonl")
        info.size = len(zeros) * times
        header = info.tobuf()
    packed = maker.folder / "bomb.tar.gz"
    with gzip.open(packed, "wb", compresslevel=9) as file:
        file.write(header)
        for _ in range(times):
            file.write(zeros)
    with gzip.open(maker.folder / "header.tar.gz", "wb") as file:
        info = tarfile.TarInfo("x")
        info.type, info.size = tarfile.XHDTYPE, 48 << 20
        file.write(info.tobuf() + bytes(48 << 20))
    with (
        zipfile.ZipFile(maker.folder / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.jsonl", "w", force_zip64=True) as one,
    ):
        for _ in range(times):
            one.write(zeros)
    (maker.folder / "cut.tar.gz").write_bytes(packed.read_bytes()[:1000])
    (maker.folder / "noise.zip").write_bytes(b"PK\x03\x04" + os.urandom(4000))
    (maker.folder / "deep.zip").write_bytes(_zip({"a.json": DEEP}))
    (maker.folder / "many.zip").write_bytes(_zip({f"{i}.json": b"" for i in range(2000)}))
    os.mkfifo(maker.folder / "pipe.zip")
    for file in (
        "bomb.tar.gz",
        "header.tar.gz",
        "bomb.zip",
        "cut.tar.gz",
        "noise.zip",
        "deep.zip",
        "many.zip",
        "pipe.zip",
    ):
        maker.add(f"archive: {file}", "archive", maker.folder / file)


def _templates(maker: _Maker) -> None:
    texts = {
        "a loop without end": "{% for i in range(999999999) %}{% for j in range(999999999) %}x{% endfor %}{% endfor %}",
        "memory without end": "{{ 'a' * 10000000000 }}",
        "Python's insides": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "calls": f"{{{{ cycler.__init__.__globals__.os.system('touch {maker.canary}') }}}}",
        "nested deep": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    }
    for name, text in texts.items():
        maker.hf(f"template: {name}", refused=False, chat_template__jinja=text.encode())
