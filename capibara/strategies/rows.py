"""Rows of a batch with the model's own answers: one answer, the conversations of one, or a pair."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from capibara.data.dataset import Dataset
from capibara.strategies.answering import Answer, Exchange


def text_rows(
    texts: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]], dataset: Dataset
) -> dict[str, np.ndarray]:
    """A row of each sequence of prompts with their answers: segments one after the other, with loss on the answers."""
    rows = {key: value for key, value in dataset.empty_batch(len(texts)).items() if key != "numbers"}
    for row, segments in enumerate(texts):
        end = 0
        for segment, (prompt, answer) in enumerate(segments, 1):
            ids, begin = np.array([*prompt, *answer], np.int32), end
            end = begin + len(ids) - 1
            rows["tokens"][row, begin:end], rows["targets"][row, begin:end] = ids[:-1], ids[1:]
            rows["weights"][row, begin + len(prompt) - 1 : end] = 1.0
            rows["segment_ids"][row, begin:end], rows["positions"][row, begin:end] = segment, np.arange(end - begin)
    return rows


def answer_rows(
    answers: Sequence[Answer], dataset: Dataset, mask_truncated: bool, conversations: int = 1
) -> dict[str, np.ndarray]:
    """As many rows of each answer as the most conversations: of its conversations, and of padding after them."""
    texts: dict[int, Answer | Exchange] = {}
    for i, answer in enumerate(answers):
        each: list[Answer | Exchange] = [*answer.earlier, answer]
        texts |= {i * conversations + j: item for j, item in enumerate(each)}
    written = text_rows([[(item.prompt, item.tokens)] for item in texts.values()], dataset)
    rows = {
        name: np.zeros((len(answers) * conversations, *value.shape[1:]), value.dtype) for name, value in written.items()
    }
    for name, value in written.items():
        rows[name][[*texts]] = value
    rows["drawn"] = np.zeros((len(answers) * conversations, dataset.length), np.float32)
    for row, item in texts.items():
        first, end = len(item.prompt) - 1, len(item.prompt) + len(item.tokens) - 1
        rows["drawn"][row, first:end] = item.drawn
        if isinstance(item, Answer) and item.is_own is not None:
            rows["weights"][row, first:end] = item.is_own
        if mask_truncated and answers[row // conversations].truncated:
            rows["weights"][row] = 0.0
    return rows


def pair_rows(pairs: Sequence[tuple[Answer, Answer]], dataset: Dataset, mask_truncated: bool) -> dict[str, np.ndarray]:
    """A row of each pair of a chosen and a rejected answer, as those of a file of preferences."""
    rows = text_rows([[(answer.prompt, answer.tokens) for answer in pair] for pair in pairs], dataset)
    if mask_truncated:
        rows["weights"][[any(answer.truncated for answer in pair) for pair in pairs]] = 0.0
    return rows
