"""Hashes of n-grams are those of the words, whatever is hashed beside them."""

import numpy as np
import pytest

from capibara.builders.preparation import shingles

TEXTS = [
    "The quick, brown fox!\njumps over",
    "a b",
    "",
    "... !",
    "Ärger im Häuschen über Straße",
    "日本語のテキスト",
    "x" * 300_000,
]


def of(text, size=5):
    return shingles.hashes([text], size)[0].tolist()


def test_case_and_punctuation_do_not_matter():
    assert of("The quick, brown fox!\njumps over") == of("the QUICK brown--fox jumps   over")
    assert of("the quick brown fox jumps over") != of("the quick brown fox jumps under")


def test_n_grams_are_counted():
    found, offsets = shingles.hashes(TEXTS[:4], 5)
    assert offsets.tolist() == [0, 2, 3, 3, 3] and len({*found.tolist()}) == 3
    assert len(of("a a a a a a")) == 2 and len({*of("a a a a a a")}) == 1


def test_the_order_of_words_matters():
    assert {*of("a b c", 2)} == {*of("a b", 2), *of("b c", 2)}
    assert of("a b", 2) != of("b a", 2) and of("ab c", 2) != of("a bc", 2)


def test_scripts_without_spaces_have_words_of_one_character():
    assert len(of("日本語のテキスト")) == 4
    assert {*of("日本語のテ")} <= {*of("、日本語のテキスト。")}
    assert len(of("Ärger im Häuschen über Straße")) == 1


@pytest.mark.parametrize("at", range(len(TEXTS)))
def test_other_texts_change_nothing(at):
    every, offsets = shingles.hashes(TEXTS * 2, 5)
    for place in (at, at + len(TEXTS)):
        assert every[offsets[place] : offsets[place + 1]].tolist() == of(TEXTS[at])


def test_long_texts_are_cut_between_words():
    long = " ".join(f"word{i % 977}" for i in range(30_000))
    short = "word3 word4 word5 word6 word7"
    assert {*of(short)} <= {*of(long)}
    assert np.unique(shingles.hashes([long], 5)[0]).size == 977


def test_no_text():
    found, offsets = shingles.hashes([], 5)
    assert len(found) == 0 and offsets.tolist() == [0]
