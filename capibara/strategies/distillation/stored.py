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
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from capibara.core import fields, limits
from capibara.core.types import HostBatch, UserError
from capibara.data.dataset import Dataset
from capibara.storage import outputs, partial

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

    def __post_init__(self) -> None:
        fields.check(self)
        if min(self.vocab_size, self.top_k) < 1 or min(self.documents, self.positions) < 0:
            raise UserError("its sizes are not positive")

    @staticmethod
    def read(folder: str) -> StoredLogProbs:
        """Reads the manifest of a folder; raises UserError if there is none."""
        try:
            record = limits.read_json(os.path.join(folder, _MANIFEST), limits.SMALL_BYTES)
            if record.pop("format", None) != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            values: dict[str, Any] = dict(record)
            return StoredLogProbs(**values)
        except (OSError, ValueError, TypeError) as error:
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


def documents_of(batch: HostBatch) -> Iterator[tuple[int, np.ndarray, int]]:
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
    folder: str, manifest: StoredLogProbs, batches: Iterable[tuple[HostBatch, np.ndarray, np.ndarray]]
) -> StoredLogProbs:
    """Writes a new folder, whole or not at all.

    Args:
      folder: must not exist.
      manifest: all but the counts.
      batches: batches, and of each the log-probabilities and ids, [B, T, K].

    Returns:
      The manifest with the counts.

    Raises:
      UserError: the folder exists or cannot be written, or no document has loss.
    """
    starts, positions = dict[int, int](), 0
    with partial.whole(folder) as unfinished:
        paths = {name: os.path.join(unfinished, name) for name in (_IDS, _LOG_P, _DOCUMENTS, _MANIFEST)}
        with open(paths[_IDS], "wb") as ids, open(paths[_LOG_P], "wb") as log_p:
            for batch, log_p_BTK, ids_BTK in batches:
                for row, at, fingerprint in documents_of(batch):
                    if fingerprint in starts:
                        continue
                    starts[fingerprint] = positions
                    positions += len(at)
                    ids.write(np.ascontiguousarray(ids_BTK[row, at], np.int32).tobytes())
                    log_p.write(np.ascontiguousarray(log_p_BTK[row, at], np.float32).tobytes())
        if not starts:
            raise UserError("the data has no token with loss, so that there is nothing to store: name other files")
        np.save(paths[_DOCUMENTS], np.array(sorted(starts.items()), np.uint64))
        manifest = dataclasses.replace(manifest, documents=len(starts), positions=positions)
        outputs.save(paths[_MANIFEST], json.dumps({"format": _FORMAT, **dataclasses.asdict(manifest)}, indent=2))
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
            if (self._documents.shape, self._documents.dtype) != ((self._manifest.documents, 2), np.uint64):
                raise ValueError(f"{_DOCUMENTS} has not {self._manifest.documents} documents")
            self._ids = np.memmap(os.path.join(folder, _IDS), np.int32, "r").reshape(shape)
            self._log_p = np.memmap(os.path.join(folder, _LOG_P), np.float32, "r").reshape(shape)
        except (OSError, ValueError) as error:
            raise UserError(
                f"Distillation.stored ({folder!r}) is incomplete ({limits.cause(error)}): prepare it again"
            ) from None

    def filled(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """This process's rows with `teacher_log_p` and `teacher_ids`, [B, T, K].

        Raises:
          UserError: there is nothing on one of its documents, or what is there are no log-probabilities.
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
        # A flipped bit would train without a word.
        if (
            not (log_p <= 0).all()
            or not np.isfinite(log_p).all()
            or ids.min() < 0
            or ids.max() >= self._manifest.vocab_size
        ):
            raise UserError(
                f"Distillation.stored ({self._folder!r}) is corrupted, it has values that are no log-probabilities or ids: "
                "prepare it again"
            )
        return {**batch, "teacher_log_p": log_p, "teacher_ids": ids}

    def _start(self, fingerprint: int) -> int | None:
        """The first position of a document; None: it is not there."""
        keys = self._documents[:, 0]
        place = int(np.searchsorted(keys, np.uint64(fingerprint)))
        return int(self._documents[place, 1]) if place < len(keys) and int(keys[place]) == fingerprint else None
