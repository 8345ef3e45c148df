"""A fuzzer of every reader of foreign files: changes good files, and accepts only success and UserError.

    python tests/interop/fuzz_readers.py READER SEED COUNT FOLDER

Run it as a process of its own with bounded memory. It prints each case's seed before the case runs, so that a crash can
be traced to it, and the seconds and the error of each case that fails.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent / "faults")]
SECONDS, BYTES = 10, 3 << 30  # of processor time, and of memory
WAITING_S = 60  # of wall time: other processes may be using the processor
NUMBERS = (0, -1, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64, 10**400, 1e308, -0.0, "", "x" * 5000)
WHOLE = ([], {}, None, True, [[]] * 50, {"a": {"b": {}}}, "..", "/etc/passwd", "a\0b", "\ud800", [0] * 1000)


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flips, splices, cuts or copies bytes, or inserts the number of a length."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8, 30))):
        at = rng.randrange(len(data) + 1) if rng.random() < 0.5 else rng.randrange(min(len(data) + 1, 400))
        match rng.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                size = rng.choice((1, 2, 4, 8))
                data[at : at + size] = rng.choice((b"\0", b"\xff", b"\x7f", b"\x80", b"\x01")) * size
            case 2:
                del data[at : at + rng.choice((1, 4, 64, 1000))]
            case 3:
                other = rng.randrange(len(data) + 1)
                data[at:at] = data[other : other + rng.choice((1, 8, 100))]
            case 4:
                number = rng.choice((2**31, 2**32 - 1, 2**62, 2**63, len(data), len(data) + 1, 0))
                data[at : at + 8] = number.to_bytes(8, rng.choice(("little", "big")))
            case 5 if rng.random() < 0.3:
                del data[at:]
    return bytes(data)


def changed_json(content: bytes, rng: random.Random) -> bytes:
    """Changes one value of it to another, or to a type's extreme, or moves it elsewhere."""
    values = json.loads(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        locations = list(_locations(values))
        owner, key = rng.choice(locations)
        match rng.randrange(5):
            case 0:
                owner[key] = rng.choice(NUMBERS)
            case 1:
                owner[key] = copy.deepcopy(rng.choice(WHOLE))
            case 2:
                other, name = rng.choice(locations)
                owner[key] = json.loads(json.dumps(other[name]))
            case 3 if isinstance(owner, dict):
                owner[rng.choice(("", "a", "\ud800", "type"))] = owner.pop(key)
            case _:
                del owner[key]
        if not list(_locations(values)):
            break
    return json.dumps(values).encode()


def _locations(values: object) -> list:
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    found = [(values, key) for key, _ in list(items)[:300]]
    for owner, key in list(found):
        found += _locations(owner[key])
    return found


def either(content: bytes, rng: random.Random) -> bytes:
    """The content, changed as JSON or as bytes."""
    return changed_json(content, rng) if rng.random() < 0.7 else changed_bytes(content, rng)


def header_json(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file with its header changed as JSON and the header's length updated."""
    if rng.random() < 0.4:
        return changed_bytes(content, rng)
    size = int.from_bytes(content[:8], "little")
    header = changed_json(content[8 : 8 + size], rng)
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def _model(path: pathlib.Path) -> None:
    from capibara.interop import open_model
    from capibara.interop.hf import config as hf_config
    from capibara.models import api

    foreign = open_model.open_model(str(path))
    model = api.build(hf_config.from_hf(foreign.config))
    open_model.check(foreign, model)
    for name in list(foreign.shapes())[:40]:
        foreign.dtype(name), foreign.read(name)
    len(foreign.tokenizer)


def _tokens(path: pathlib.Path, kind: str) -> None:
    from capibara.data.tokenizers import vocabulary

    made = getattr(vocabulary, kind)(path=str(path))
    made.encode("a text, 123 \u2581"), made.size, made.eos_id, made.token_bytes()


def _lines(path: pathlib.Path) -> None:
    from capibara.data.sources.sources import JsonlSource

    documents = JsonlSource(files=(str(path),)).open("train")
    [documents.example(i) for i in range(len(documents))]


def _instructions(path: pathlib.Path) -> None:
    from capibara.data.chat.instructions import prepare_instructions

    prepare_instructions([str(path)], str(path.parent / "out"), members=["*.json*"], held_out=0.5, report=len)


def _adapter(path: pathlib.Path) -> None:
    from hostile_files import LLAMA

    from capibara.interop.peft import folder as peft
    from capibara.models import api

    peft.read_peft(str(path), api.build(LLAMA), "llama")


def _gin(path: pathlib.Path) -> None:
    from capibara.interop.t5x import names as t5x_names

    text = path.read_bytes().decode("utf-8", "replace")
    t5x_names.config_of(t5x_names.network_of(text)), t5x_names.vocabulary_of(text)


# Reader -> the files to copy, the file among them that is changed, how, and the function that reads it.
Reader = tuple[str, str, Callable[[bytes, random.Random], bytes], Callable[[pathlib.Path], None]]
READERS: dict[str, Reader] = {
    "safetensors": ("hf", "model.safetensors", header_json, _model),
    "config": ("hf", "config.json", either, _model),
    "index": ("several", "model.safetensors.index.json", either, _model),
    "torch": ("torch", "pytorch_model.bin", changed_bytes, _model),
    "torch_legacy": ("legacy", "pytorch_model.bin", changed_bytes, _model),
    "gguf": ("model.gguf", "", changed_bytes, _model),
    "t5x_index": ("t5x", "checkpoint_0/checkpoint", changed_bytes, _model),
    "t5x_zarr": ("t5x", "checkpoint_0/target.token_embedder.embedding/.zarray", either, _model),
    "t5x_chunk": ("t5x", "checkpoint_0/target.token_embedder.embedding/0.0", changed_bytes, _model),
    "t5x_gin": ("t5x/config.gin", "", changed_bytes, _gin),
    "adapter_config": ("adapter", "adapter_config.json", either, _adapter),
    "adapter": ("adapter", "adapter_model.safetensors", header_json, _adapter),
    "tokenizer": ("hf", "tokenizer.json", either, functools.partial(_tokens, kind="TokenizerJsonVocabulary")),
    "tokenizer_config": ("hf", "tokenizer_config.json", either, functools.partial(_tokens, kind="TokenizerJsonVocabulary")),
    "sentencepiece": ("bytes.model", "", changed_bytes, functools.partial(_tokens, kind="SentencePieceVocabulary")),
    "lines": ("words.jsonl", "", changed_bytes, _lines),
    "tar": ("chats.tar.gz", "", changed_bytes, _instructions),
    "plain_tar": ("chats.tar", "", changed_bytes, _instructions),
    "zip": ("chats.zip", "", changed_bytes, _instructions),
    "ocdbt": ("ocdbt", "state/manifest.ocdbt", changed_bytes, _model),
}  # fmt: skip


def make(folder: pathlib.Path) -> None:
    """Writes the good files into folder/good."""
    import hostile_files
    import jax
    import numpy as np

    from capibara.interop.hf import folder as hf_folder
    from capibara.interop.hf import torch_file
    from capibara.interop.peft import folder as peft
    from capibara.models import api

    maker = hostile_files._Maker(folder, folder / "canary", False)
    good = maker.good
    values, shapes, tensors = maker.values, maker.shapes, maker.tensors
    files = hostile_files.tokenizer_files()
    hf_folder.save_hf(
        str(good / "several"), values, shapes, tensors.items(), files, dtype="float32", shard_bytes=20_000
    )
    hf_folder.save_hf(str(good / "torch"), values, shapes, tensors.items(), files, dtype="float32", state_dict=True)
    shutil.copytree(good / "torch", good / "legacy")
    (good / "legacy" / "pytorch_model.bin").write_bytes(_legacy(tensors, torch_file))
    lora = api.Lora(rank=4, alpha=8.0, targets=("*/attention/query",))
    import dataclasses

    config = dataclasses.replace(hostile_files.LLAMA, lora=dataclasses.replace(lora, targets=api.Lora().targets))
    model = api.build(config)
    params = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), model.abstract_params)
    peft.write_peft(str(good / "adapter"), params, model, "llama")
    texts = [json.dumps({"prompt": f"say {i}", "completion": f"{i} it is", "text": f"number {i}"}) for i in range(40)]
    (good / "words.jsonl").write_text("\n".join(texts) + "\n")
    _archives(good, "\n".join(texts).encode())
    _sentencepiece(good / "bytes.model", texts)
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
        checkpointer.save(good / "ocdbt" / "state", {"target": _arrays(good / "t5x" / "checkpoint_0")})


def _legacy(tensors: dict, torch_file: object) -> bytes:
    """The tensors in the format of torch.save before 1.6."""
    import pickle

    entries = [(name, str(number), value) for number, (name, value) in enumerate(tensors.items())]
    protocol = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    head = [pickle.dumps(value, protocol=2) for value in (torch_file.MAGIC, torch_file._PROTOCOL, protocol)]
    keys = pickle.dumps([key for _, key, _ in entries], protocol=2)
    data = b"".join(value.size.to_bytes(8, "little") + value.tobytes() for _, _, value in entries)
    return b"".join([*head, torch_file._pickled(entries), keys]) + data


def _arrays(folder: pathlib.Path) -> dict:
    """The arrays of a T5X checkpoint, nested by their names."""
    import tensorstore

    found: dict = {}
    for path in folder.glob("target.*"):
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}}
        *owners, last = path.name.removeprefix("target.").split(".")
        inner = found
        for owner in owners:
            inner = inner.setdefault(owner, {})
        inner[last] = tensorstore.open(spec).result().read().result()
    return found


def _archives(good: pathlib.Path, content: bytes) -> None:
    import tarfile
    import zipfile

    with zipfile.ZipFile(good / "chats.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("chats.jsonl", content)
    for name, mode in (("chats.tar", "w"), ("chats.tar.gz", "w:gz")):
        with tarfile.open(good / name, mode) as archive:
            info = tarfile.TarInfo("chats.jsonl")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def _sentencepiece(path: pathlib.Path, texts: list[str]) -> None:
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=out, vocab_size=300, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, pad_id=3,
    )  # fmt: skip
    path.write_bytes(out.getvalue())


def main(reader: str, seed: int, count: int, folder: pathlib.Path) -> int:
    """Runs the cases seed ... seed + count; returns how many failed."""
    from capibara.core.types import UserError

    warnings.simplefilter("ignore")
    of, file, change, read = READERS[reader]
    good = folder / "good" / of
    work = folder / f"work_{reader}" / os.path.basename(of)
    content = (good / file if file else good).read_bytes()
    failed = 0
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    signal.signal(signal.SIGALRM, _late)
    for number in range(seed, seed + count):
        shutil.rmtree(work.parent, ignore_errors=True)
        work.parent.mkdir()
        shutil.copytree(good, work) if good.is_dir() else shutil.copy(good, work)
        (work / file if file else work).write_bytes(change(content, random.Random(number)) if number else content)
        print(f"case {reader} {number}", flush=True)
        begin_s = time.process_time()
        signal.alarm(WAITING_S)
        try:
            read(work)
            print("fine")
        except UserError as error:
            if number == 0:
                print(f"FAILED {reader} {number}: the good file is refused: {error}")
                failed += 1
            if "\n" in str(error):
                print(f"FAILED {reader} {number}: of several lines: {error!r}")
                failed += 1
        except BaseException:  # anything else is a finding
            print(f"FAILED {reader} {number}: {traceback.format_exc()}")
            failed += 1
        finally:
            signal.alarm(0)
        if (took_s := time.process_time() - begin_s) > SECONDS:
            print(f"FAILED {reader} {number}: it took {took_s:.1f} s of processor time")
            failed += 1
    return failed


def _late(*_: object) -> None:
    raise TimeoutError(f"not done in {WAITING_S} s")


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(pathlib.Path(sys.argv[2]))
        sys.exit(0)
    sys.exit(min(100, main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4]))))
