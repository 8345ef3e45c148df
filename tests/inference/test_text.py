"""Stop strings match special tokens as the tokenizer spells them, and texts continue their prompts."""

from __future__ import annotations

import random

import pytest

from capibara.data.tokenizers.vocabulary import ByteVocabulary, TokenizerJsonVocabulary
from capibara.inference.sampling.text import TextStream
from capibara.inference.server.openai.log_probabilities import named
from tests.data.tokenizers import kinds


@pytest.fixture(
    scope="module",
    params=[kinds.llama_2_with_added_tokens, kinds.byte_level_with_added_tokens],
    ids=lambda made: made.__name__,
)
def vocabulary(request, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    request.param().save(path)
    return TokenizerJsonVocabulary(path=path)


def fed(vocabulary, ids, stop):
    stream = TextStream(vocabulary, stop)
    parts = []
    for token in ids:
        parts.append(stream.feed(token))
        if stream.stopped:
            return "".join(parts), True
    return "".join([*parts, stream.close()]), stream.stopped


def test_a_stop_string_ends_the_text_where_it_is_spelled(vocabulary):
    """Any part of the text with its special tokens spelled: the text is what is before it, without special tokens."""
    rng, special = random.Random(0), 0
    for text in kinds.texts(120, seed=3):
        ids = vocabulary.encode(text + "<|im_end|> and</tool_call>x")
        whole, shown, before = "", [], ""
        for end in range(1, len(ids) + 1):
            after = vocabulary.decode(ids[:end])
            if "\ufffd" in after:
                break  # a part of a character: its text is not known yet
            name = vocabulary.spelling(ids[end - 1])
            whole += after[len(before) :] + name
            shown += [True] * (len(after) - len(before)) + [False] * len(name)
            before = after
        else:
            start = rng.randrange(len(whole))
            stop = whole[start : start + rng.randint(1, 15)]
            first = whole.index(stop)
            want = "".join(character for character, is_shown in zip(whole[:first], shown) if is_shown)
            assert fed(vocabulary, ids, [stop, "never"]) == (want, True), (text, stop)
            special += not all(shown[first : first + len(stop)])
    assert special > 5


@pytest.mark.parametrize(
    "stop, want",
    [
        ("<|im_end|>", "the river"),
        ("r<|im_end|>", "the rive"),
        ("<|im_en", "the river"),
        ("</tool_call>", "the riverand"),
    ],
)
def test_a_stop_string_may_be_a_special_token(vocabulary, stop, want):
    ids = vocabulary.encode("the river<|im_end|>and</tool_call>x")
    want = vocabulary.decode(ids).partition("</tool_call>")[0] if stop == "</tool_call>" else want
    assert fed(vocabulary, ids, [stop]) == (want, True)


def test_text_with_stop_strings_that_do_not_occur_is_the_text(vocabulary):
    """Holding back what may begin a stop string changes nothing."""
    rng = random.Random(0)
    for text in kinds.texts(40):
        ids = vocabulary.encode(text)
        stops = ["".join(rng.choice("<|im_ \n\u2581e") for _ in range(9)) + "\x01" for _ in range(3)]
        assert fed(vocabulary, ids, stops) == (vocabulary.decode(ids), False)


def test_a_text_after_a_prompt_has_the_space_between_them(vocabulary):
    for text in ("the river and the reeds", "def f(x):\n    return x", "a  b"):
        ids = vocabulary.encode(text)
        for cut in range(1, len(ids)):
            before, after = ids[:cut], ids[cut:]
            assert vocabulary.decode(before) + vocabulary.gap(before, after) + vocabulary.decode(after) == text


def test_ids_have_different_names(vocabulary):
    special = {i: content for i, content in vocabulary._spelled.items() if i in vocabulary._special_ids}
    for token, content in special.items():
        assert vocabulary.spelling(token) == named(vocabulary, token) == content
    assert vocabulary.spelling(vocabulary.encode("river")[-1]) == "" and vocabulary.spelling(10**6) == ""
    assert named(vocabulary, 10**6) == "<id 1000000>"
    assert [named(ByteVocabulary(), i) for i in (0, 1, 2, 3, 68, 200, 380)] == [
        "<pad>", "</s>", "<unk>", "\x00", "A", "bytes:\\xc5", "<id 380>",
    ]  # fmt: skip
