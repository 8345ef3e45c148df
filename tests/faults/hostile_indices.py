"""Hostile folders of `capibara prepare index`, each with a manifest that fits its files."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable

import numpy as np

from capibara.cli.composition import retrieving
from capibara.inference.engine.reading import Pooling
from capibara.retrieval import build
from capibara.retrieval.settings import IndexPreparation

WORDS = "river grass swims eats sun water bank night sleeps group call rodent web foot leaf bark pup".split()


def make(folder: pathlib.Path, model: str, canary: pathlib.Path) -> dict[str, pathlib.Path]:
    """Writes a good folder and hostile ones; returns their paths by name.

    Args:
      folder: a new folder.
      model: that embeds the documents.
      canary: a file that code of theirs would make.
    """
    folder.mkdir()
    rng = np.random.default_rng(0)
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": " ".join(rng.choice(WORDS, 9))}) + "\n" for _ in range(60)))
    (folder / "questions.jsonl").write_text(json.dumps({"question": "which grass?", "answer": "grass"}) + "\n")
    settings = IndexPreparation(chunk_tokens=32, overlap=0, queries=20, recall=0.1, ms=1000.0)
    good = folder / "good"
    embedder = retrieving.embedder(model, Pooling.MEAN)
    build.prepare([str(documents)], str(good), settings, embedder, lambda topic, detail: None)
    index = (good / build.INDEX).read_bytes()
    assert index[:4] == b"IxSQ", "the offsets below are those of int8"
    record = json.loads((good / build.RECORD).read_text())
    code = b"cos\nsystem\n(S'touch " + os.fsencode(canary) + b"'\ntR."
    contents: dict[str, tuple[str, bytes]] = {
        "of a kind that opens another file": (build.INDEX, b"IxDL" + index[4:]),
        "of 2**40 vectors": (build.INDEX, index[:8] + (2**40).to_bytes(8, "little") + index[16:]),
        "with an array of 2**36 values": (build.INDEX, index[:65] + (2**36).to_bytes(8, "little") + index[73:]),
        "cut short": (build.INDEX, index[: len(index) // 2]),
        "empty": (build.INDEX, b""),
        "a pickle in npy": (build.INDEX, b"\x93NUMPY\x01\x00" + code),
        "a pickle": (build.CENTER, code),
        "not finite": (build.CENTER, np.full(record["dims"], np.nan, "<f4").tobytes()),
        "chunks nested deep": (
            build.CHUNKS,
            b"[" * 100_000 + b"]" * 100_000 + b"\n" + b"{}\n" * (record["chunks"] - 1),
        ),
        "fewer chunks": (build.CHUNKS, b"{}\n"),
        "a record nested deep": (build.RECORD, b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        "an effort of 10**12": (build.RECORD, _json(record | {"chosen": record["chosen"] | {"effort": 10**12}})),
        "dims of 2**40": (build.RECORD, _json(record | {"dims": 2**40})),
        "a model that is a device": (build.RECORD, _json(record | {"model": record["model"] | {"path": "/dev/zero"}})),
    }
    result = {"good": good}
    for name, (file, content) in contents.items():
        result[name] = _copied(good, folder / name.replace(" ", "_"))
        (result[name] / file).write_bytes(content)
        _fit(result[name], file, content)
    kinds: dict[str, Callable[[pathlib.Path], object]] = {
        "with a pipe": os.mkfifo,
        "with a link out": lambda path: path.symlink_to(documents),
        "with a device": lambda path: path.symlink_to("/dev/zero"),
    }
    for name, put in kinds.items():
        result[name] = _copied(good, folder / name.replace(" ", "_"))
        (result[name] / build.CHUNKS).unlink()
        put(result[name] / build.CHUNKS)
    return result


def _json(value: dict) -> bytes:
    return json.dumps(value).encode()


def _copied(good: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(good, path))


def _fit(folder: pathlib.Path, name: str, content: bytes) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for file in manifest["files"]:
        if file["name"] == name:
            file |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(manifest))
