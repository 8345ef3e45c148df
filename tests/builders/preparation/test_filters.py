"""Filters keep what is good, and say why they drop the rest."""

import collections

import pytest

from capibara.builders.preparation import filters
from capibara.builders.preparation.filters import DatatroveFilter, LanguageFilter
from capibara.core.types import UserError

ENGLISH = "The library keeps the books that people of the town have read, and it lends them to those who ask for them with care. "
GERMAN = "Die Bibliothek bewahrt die Bücher auf, die die Leute der Stadt gelesen haben, und sie verleiht sie an alle. "


def test_quality_is_that_of_datatrove():
    gopher = DatatroveFilter(name="GopherQualityFilter")
    good = " ".join(f"{ENGLISH}{i}" for i in range(4))
    assert gopher.judge(good).text == good
    assert gopher.judge("too short").reason == "gopher_short_doc"
    assert gopher.judge("# # # " + good.replace(" ", " # ")).reason == "gopher_too_many_hashes"


def test_options_are_passed_on():
    short = DatatroveFilter(name="GopherQualityFilter", options={"min_doc_words": 3, "min_stop_words": 0})
    assert short.judge("these are enough words").text
    with pytest.raises(UserError, match="DatatroveFilter.options.*least"):
        DatatroveFilter(name="GopherQualityFilter", options={"least": 3}).judge("x")


def test_texts_without_words_are_dropped():
    assert DatatroveFilter(name="FineWebQualityFilter").judge("\n\n").reason == "empty"
    options = {"min_doc_words": 0, "max_doc_words": 0, "min_avg_word_length": 0, "max_avg_word_length": 0}
    assert DatatroveFilter(name="GopherQualityFilter", options=options).judge(" ").text is None


def test_a_filter_may_rewrite():
    c4 = DatatroveFilter(name="C4QualityFilter", options={"min_num_sentences": 1})
    assert c4.rewrites and not DatatroveFilter(name="GopherQualityFilter").rewrites
    assert c4.judge(f"{ENGLISH}\nno end of a sentence here\n").text == ENGLISH.strip()


def test_languages_are_distinguished():
    english = LanguageFilter(languages=("en",))
    assert english.judge(ENGLISH).text == ENGLISH and english.judge(GERMAN).reason == "language"
    assert LanguageFilter(languages=("en", "de"), least=0.0).judge(GERMAN).text == GERMAN
    assert LanguageFilter(languages=("en",), least=1.0).judge("a bee").reason in ("language", "language_unsure")


def test_the_first_filter_counts():
    dropped = collections.Counter()
    chain = (LanguageFilter(languages=("en",)), DatatroveFilter(name="GopherQualityFilter"))
    assert filters.judge(GERMAN, chain, dropped) is None and filters.judge(ENGLISH, chain, dropped) is None
    assert dropped == {"language": 1, "gopher_short_doc": 1}


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: DatatroveFilter(name="GopherQuality"), "did you mean"),
        (lambda: DatatroveFilter(name="URLFilter"), "must be one of"),
        (lambda: LanguageFilter(languages=()), "name at least one"),
        (lambda: LanguageFilter(languages=("en",), least=2.0), "from 0 to 1"),
        (lambda: LanguageFilter(languages=("xx",)).judge("text"), "'xx'"),
    ],
)
def test_mistakes_are_explained(make, words):
    with pytest.raises(UserError, match=words):
        make()
