"""A teacher's log-probabilities on disk, so that training needs no teacher.

manifest.json    of which teacher, tokenizer and temperature, and how many tokens at each position
documents.npy    uint64 [documents, 2]: the fingerprint of a document's tokens, ascending, and its first position
ids.bin          int32 [positions, K]: the most probable next tokens, of positions with loss alone
log_p.bin        float32 [positions, K]: their log-probabilities, descending
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator

import numpy as np

from capibara.core import limits
from capibara.core.types import Batch, UserError
from capibara.data.dataset import Dataset

_MANIFEST, _DOCUMENTS, _IDS, _LOG_P = "manifest.json", "documents.npy", "ids.bin", "log_p.bin"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class StoredLogProbs:
    """The manifest of a folder.

    Attributes:
      teacher: its path when it was asked.
      vocabulary: fingerprint of the tokenizer.
      vocab_size: ids of the teacher.
      top_k: tokens at each position.
      temperature: of the distributions.
      documents, positions: how many there are.
    """

    teacher: str
    vocabulary: str
    vocab_size: int
    top_k: int
    temperature: float
    documents: int = 0
    positions: int = 0

    @staticmethod
    def read(folder: str) -> StoredLogProbs:
        """Reads the manifest of a folder; raises UserError if there is none."""
        path = os.path.join(folder, _MANIFEST)
        try:
            with open(path, encoding="utf-8") as file:
                record = json.load(file)
            if record.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            return StoredLogProbs(**record)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"Distillation.stored ({folder!r}) has no {_MANIFEST} of a teacher's log-probabilities ({limits.cause(error)}): "
                "write it with capibara prepare teacher"
            ) from None

    def check(self, folder: str, dataset: Dataset, temperature: float) -> None:
        """Raises UserError if they are of another tokenizer or temperature."""
        if dataset.get_vocabulary().fingerprint() != self.vocabulary:
            raise UserError(
                f"Distillation.stored ({folder!r}) is of another tokenizer than Dataset.vocabulary: prepare it with the run's "
                f"tokenizer, which must be that of {self.teacher}"
            )
        if temperature != self.temperature:
            raise UserError(
                f"Distillation.temperature is {temperature}, and Distillation.stored ({folder!r}) is of {self.temperature}: "
                "set it to that, or prepare the folder again"
            )


def documents_of(batch: Batch) -> Iterator[tuple[int, np.ndarray, int]]:
    """The row, the positions with loss and the fingerprint of each document of a batch that has any."""
    for row, segments_T in enumerate(batch["segment_ids"]):
        for segment in range(1, int(segments_T.max(initial=0)) + 1):
            inside_T = segments_T == segment
            at = np.flatnonzero(inside_T & (batch["weights"][row] > 0))
            if not len(at):
                continue
            digest = hashlib.blake2b(digest_size=8)
            for name in ("tokens", "targets"):
                digest.update(np.ascontiguousarray(batch[name][row][inside_T], np.int32).tobytes())
            digest.update((batch["weights"][row][inside_T] > 0).tobytes())
            yield row, at, int.from_bytes(digest.digest(), "little")


def write(
    folder: str, manifest: StoredLogProbs, batches: Iterable[tuple[Batch, np.ndarray, np.ndarray]]
) -> StoredLogProbs:
    """Writes a new folder, whole or not at all.

    Args:
      folder: must not exist.
      manifest: all but the counts.
      batches: batches, and of each the log-probabilities and ids, [B, T, K].

    Returns:
      The manifest with the counts.
    """
    partial, starts, positions = f"{folder.rstrip('/')}.partial", dict[int, int](), 0
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial)
    with open(os.path.join(partial, _IDS), "wb") as ids, open(os.path.join(partial, _LOG_P), "wb") as log_p:
        for batch, log_p_BTK, ids_BTK in batches:
            for row, at, fingerprint in documents_of(batch):
                if fingerprint in starts:
                    continue
                starts[fingerprint] = positions
                positions += len(at)
                ids.write(np.ascontiguousarray(ids_BTK[row, at], np.int32).tobytes())
                log_p.write(np.ascontiguousarray(log_p_BTK[row, at], np.float32).tobytes())
    table = np.array(sorted(starts.items()), np.uint64).reshape(-1, 2)
    np.save(os.path.join(partial, _DOCUMENTS), table)
    manifest = dataclasses.replace(manifest, documents=len(table), positions=positions)
    with open(os.path.join(partial, _MANIFEST), "w", encoding="utf-8") as file:
        json.dump({"format": _FORMAT, **dataclasses.asdict(manifest)}, file, indent=2)
    os.rename(partial, folder)
    return manifest


class StoredReader:
    """Adds stored log-probabilities to batches.

    Args:
      folder: of `write`.

    Raises:
      UserError: a file is missing, or has another size than the manifest says.
    """

    def __init__(self, folder: str):
        self._folder, self._manifest = folder, StoredLogProbs.read(folder)
        shape = (self._manifest.positions, self._manifest.top_k)
        try:
            self._documents = np.load(os.path.join(folder, _DOCUMENTS), allow_pickle=False)
            self._ids = np.memmap(os.path.join(folder, _IDS), np.int32, "r", shape=shape)
            self._log_p = np.memmap(os.path.join(folder, _LOG_P), np.float32, "r", shape=shape)
        except (OSError, ValueError) as error:
            raise UserError(
                f"Distillation.stored ({folder!r}) is incomplete ({limits.cause(error)}): prepare it again"
            ) from None

    def filled(self, batch: Batch) -> dict[str, np.ndarray]:
        """This process's rows with `teacher_log_p` and `teacher_ids`, [B, T, K].

        Raises:
          UserError: there is nothing on one of its documents.
        """
        shape = (*batch["tokens"].shape, self._manifest.top_k)
        log_p, ids = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
        log_p[:] = -np.log(2.0 * self._manifest.top_k)  # any distribution: positions without loss need a finite one
        for row, at, fingerprint in documents_of(batch):
            start = self._start(fingerprint)
            if start is None or start + len(at) > self._manifest.positions:
                raise UserError(
                    f"Distillation.stored ({self._folder!r}) has nothing on a document of the data that begins with the "
                    f"tokens {batch['tokens'][row][:8].tolist()}: prepare it again with these files, template and length"
                )
            log_p[row, at], ids[row, at] = self._log_p[start : start + len(at)], self._ids[start : start + len(at)]
        return {**batch, "teacher_log_p": log_p, "teacher_ids": ids}

    def _start(self, fingerprint: int) -> int | None:
        """The first position of a document; None: it is not there."""
        keys = self._documents[:, 0]
        place = int(np.searchsorted(keys, np.uint64(fingerprint)))
        return int(self._documents[place, 1]) if place < len(keys) and int(keys[place]) == fingerprint else None
