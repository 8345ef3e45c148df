"""Conversations of bullets: in their own words, and as capibara's own reader of chats expects them."""

from __future__ import annotations

import pytest

from capibara.builders.playbooks.bullets import Bullet
from capibara.builders.playbooks.chats import ChatKind, PlaybookChats, of_domain, question
from capibara.builders.playbooks.statistics import Ranked
from capibara.core.types import UserError
from capibara.data.chat.formats import read_conversation


def ranked(content, number=1, quality=0.5, section="STRATEGIES", texts=(), domain="sql"):
    bullet = Bullet(id=f"str-{number:05d}", section=section, content=content, helpful=3, harmful=1)
    return Ranked(bullet=bullet, quality=quality, domain=domain, sources=("a.md:1",), texts=texts)


def chats(*given, **settings):
    return list(of_domain(given, PlaybookChats(**settings)))


@pytest.mark.parametrize(
    "content, words",
    [
        ("When a query is slow, add an index.", "when a query is slow"),
        ("If the API returns 429, wait and retry.", "if the API returns 429"),
        ("To count rows quickly, read the statistics.", " count rows quickly"),
        ("**Use indices**: they make it quick.", "Use indices"),
        ("Prefer `itertools.groupby` after sorting.", "`itertools.groupby`"),
        ("Always verify data types.", None),
        ("When in doubt; stop, look.", None),
        ("Use ``` to fence", None),
    ],
)
def test_questions_are_the_bullets_own_words(content, words):
    asked = question(Bullet(id="a", section="S", content=content))
    assert (asked is None) if words is None else words.lower() in asked.lower(), asked


def test_the_reader_of_chats_reads_them():
    same = tuple(Bullet(id="", section="S", content=text, helpful=1) for text in ("Look there", "look there."))
    found = chats(
        *(ranked(f"When it is {i} o'clock, stop.\nNow.", i, texts=same if i == 2 else ()) for i in range(1, 8))
    )
    assert {chat["kind"] for chat in found} == {*ChatKind}
    for chat in found:
        roles = [message["role"] for message in read_conversation(chat, "a.jsonl:1").messages]
        assert roles == ["user", "assistant"]


def test_advice_is_answered_by_the_bullet():
    [chat] = chats(ranked("When a query is slow, add an index."), kinds=(ChatKind.ADVICE,))
    assert "when a query is slow" in chat["messages"][0]["content"].lower()
    assert chat["messages"][1]["content"] == "When a query is slow, add an index."
    assert (chat["domain"], chat["section"], chat["bullets"]) == ("sql", "STRATEGIES", ["str-00001"])


def test_every_bullet_is_in_a_conversation_about_its_section():
    given = [ranked(f"Advice{letter * 3} for you", i, section="AB"[i % 2]) for i, letter in enumerate("abcdefghijklm")]
    found = chats(*given, kinds=(ChatKind.SECTION,))
    assert sorted(name for chat in found for name in chat["bullets"]) == sorted(one.bullet.id for one in given)
    asked = [chat["messages"][0]["content"] for chat in found]
    assert len({*asked}) == len(asked) and "adviceggg" not in asked[0].lower()
    assert found[0]["messages"][1]["content"].startswith("1. Adviceaaa for you\n2. Adviceccc")


def test_merged_bullets_make_a_conversation_about_merging():
    texts = (
        Bullet(id="", section="S", content="Look there", helpful=1),
        Bullet(id="", section="S", content="look there.", helpful=2, harmful=1),
    )
    [chat] = chats(ranked("look there.", texts=texts), kinds=(ChatKind.MERGE,))
    assert chat["messages"][0]["content"].endswith(
        "helpful=1 harmful=0 :: Look there\n\nhelpful=2 harmful=1 :: look there."
    )
    assert chat["messages"][1]["content"] == "helpful=3 harmful=1 :: look there."


def test_settings_choose_conversations():
    given = [
        ranked(f"When the case is {letter * 4}, do {letter * 5}.", i, quality=1 - i / 10)
        for i, letter in enumerate("abcdefgh")
    ]
    everything = chats(*given)
    assert [chat["kind"] for chat in everything].count("advice") == 8 and PlaybookChats().per_domain == 7_000
    assert chats(*given, per_domain=3) == everything[:3]
    assert all(chat["quality"] >= 0.75 for chat in chats(*given, min_quality=0.75))
    assert [chat["kind"] for chat in chats(*given, max_characters=200)] == ["advice"] * 8
    for wrong in (dict(per_domain=0), dict(min_quality=2.0)):
        with pytest.raises(UserError, match="PlaybookChats"):
            PlaybookChats(**wrong)


def test_equal_conversations_are_made_once():
    assert (
        len(chats(ranked("When it rains, stay in."), ranked("When it rains, stay in.", 2), kinds=(ChatKind.ADVICE,)))
        == 1
    )
