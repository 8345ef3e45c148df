"""Rows of answers: which tokens are trained, and answers that a checkpoint holds."""

from __future__ import annotations

import json

import numpy as np
import pytest

import capibara as cb
from capibara.strategies import rows as rows_of
from capibara.strategies.answering import Answer

DRAWN = [-0.5, -0.25, 0.0, 0.0, -1.0]
IS_OWN = [True, True, False, False, True]


@pytest.mark.parametrize(
    ("is_own", "truncated", "weights"),
    [
        (None, False, [0, 1, 1, 1, 1, 1, 0, 0]),
        (IS_OWN, False, [0, 1, 1, 0, 0, 1, 0, 0]),
        (IS_OWN, True, [0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_only_the_models_tokens_have_loss(is_own, truncated, weights):
    """Of an answer that was cut off none have, with mask_truncated."""
    dataset = cb.Dataset(source=cb.StdlibSource(), vocabulary=cb.ByteVocabulary(), length=8, packing="none")
    answer = Answer([5, 6], [11, 12, 13, 14, 15], DRAWN, 1.0, (1.0,), truncated, is_own)
    rows = rows_of.answer_rows([answer], dataset, mask_truncated=True)
    np.testing.assert_array_equal(rows["weights"][0], weights)
    np.testing.assert_array_equal(rows["drawn"][0], [0, *DRAWN, 0, 0])
    np.testing.assert_array_equal(rows["targets"][0, :6], [6, 11, 12, 13, 14, 15])


@pytest.mark.parametrize("is_own", [None, IS_OWN])
def test_an_answer_is_unpacked_as_it_was(is_own):
    answer = Answer([5, 6], [11, 12, 13, 14, 15], DRAWN, 1.0, (1.0, 0.5), False, is_own)
    assert Answer.of(json.loads(json.dumps(answer.packed()))) == answer
