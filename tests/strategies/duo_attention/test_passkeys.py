"""Passkeys are put into texts, and asked for behind them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import capibara as cb
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.strategies.duo_attention.passkeys import Passkeys

PASSKEYS = Passkeys(ByteVocabulary(), count=2, words=2, shortest=None, seed=0)


def rows(length=400, count=3):
    tokens = np.random.default_rng(0).integers(97, 120, (count, length)).astype(np.int32)
    segments = np.ones_like(tokens)
    segments[1, 300:] = 2
    segments[2] = 0
    weights = segments.astype(np.float32)
    return {"tokens": tokens, "targets": tokens, "weights": weights, "segment_ids": segments, "positions": segments}


def test_passkeys_are_asked_for_behind_the_text():
    given = rows()
    got, again = PASSKEYS.rows(given), PASSKEYS.rows(given)
    assert (given["segment_ids"][1, 300:] == 2).all()  # the given batch stays as it is
    for name, value in got.items():
        np.testing.assert_array_equal(value, again[name])
        np.testing.assert_array_equal(value[2], given[name][2])  # padding stays padding
    for row in range(2):
        assert got["tokens"][row, 0] == ByteVocabulary().bos_id and (got["segment_ids"][row] == 1).all()
        np.testing.assert_array_equal(got["positions"][row], np.arange(400))
        np.testing.assert_array_equal(got["targets"][row, :-1], got["tokens"][row, 1:])
        text = ByteVocabulary().decode(got["tokens"][row, 1:].tolist())
        needles, answers = text[: text.index("What is")], text[text.index("What is") :]
        answered = ByteVocabulary().decode(got["targets"][row][got["weights"][row] > 0].tolist())
        keys = [needles.split(f"Passkey {n} is:")[1].split(".")[0] for n in (1, 2)]
        order = sorted((1, 2), key=lambda n: answers.index(f"What is passkey {n}?"))
        assert answered == "".join(keys[n - 1] for n in order) and len(keys[0].split()) == 2
    assert (got["tokens"][0] != got["tokens"][1]).any()


def test_rows_are_of_several_lengths():
    lengths = set()
    for seed in range(5):
        got = dataclasses.replace(PASSKEYS, shortest=360, seed=seed).rows(rows())
        lengths |= set((got["segment_ids"][:2] > 0).sum(axis=1).tolist())
        assert got["weights"].sum() > 0 and not got["weights"][got["segment_ids"] == 0].any()
    assert len(lengths) > 3 and min(lengths) >= 360


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(passkeys=0), "DuoAttention.passkeys is 0"),
        (dict(passkey_words=0), "DuoAttention.passkey_words is 0"),
        (dict(shortest=0), "DuoAttention.shortest is 0"),
        (dict(gate_weight=-1.0), "DuoAttention.gate_weight is -1.0"),
    ],
)
def test_mistakes_are_told(fields, message):
    with pytest.raises(UserError, match=message):
        cb.DuoAttention(**fields)
