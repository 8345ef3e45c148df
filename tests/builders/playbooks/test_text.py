"""The text form of playbooks is read whole, written, and read again as the same bullets."""

from __future__ import annotations

import random
import re
import time

import pytest

from capibara.builders.files.problems import Problems
from capibara.builders.files.reading import Line, lines
from capibara.builders.playbooks.bullets import (
    MOST_CHARACTERS,
    Bullet,
    domain_name,
    identifier,
    normalised,
    section_name,
)
from capibara.builders.playbooks.text import Parser, written


def parse(text, problems=None):
    parser = Parser(Problems() if problems is None else problems)
    return list(parser.parse(Line("a.md", number, line) for number, line in enumerate(text.split("\n"), 1))), parser


def bullets(text):
    return [(one.id, one.section, one.content, one.helpful, one.harmful) for one in parse(text)[0]]


def test_sections_votes_and_lines_are_read():
    text = """# ACE Playbook: SQL

    A description.
[gen-00001] helpful=1 harmful=0 :: Before any header
## STRATEGIES & INSIGHTS
[str-00002] helpful=5 harmful=2 :: One line, with :: in it

- [str-00003] helpful=0 harmful=0 :: Two lines,
      the second indented

  and a third.

## Empty

##common mistakes ##
* **[mis-00004]** helpful = 3, harmful = 1, neutral = 7 :: Votes with commas
12. [dec-NEW] :: Without votes
[a b] (helpful=1 harmful=1) ::
  Text below its votes"""
    found, parser = parse(text)
    assert [(one.id, one.section, one.content, one.helpful, one.harmful, one.line) for one in found] == [
        ("gen-00001", "GENERAL", "Before any header", 1, 0, 4),
        ("str-00002", "STRATEGIES & INSIGHTS", "One line, with :: in it", 5, 2, 6),
        ("str-00003", "STRATEGIES & INSIGHTS", "Two lines,\n    the second indented\n\nand a third.", 0, 0, 8),
        ("mis-00004", "common mistakes ##", "Votes with commas", 3, 1, 16),
        ("dec-NEW", "common mistakes ##", "Without votes", 0, 0, 17),
        ("a b", "common mistakes ##", "Text below its votes", 1, 1, 18),
    ]
    assert parser.outside == 2


CODE = """[cod-1] helpful=1 harmful=0 :: Use this:
{fence}python
# a comment
## a second one
{end}
## NEXT
[nex-2] helpful=1 harmful=0 :: Next"""


@pytest.mark.parametrize("fence, end", [("```", "```"), ("  ~~~~", "~~~~~"), ("```", "```  ")])
def test_a_header_within_closed_code_is_text(fence, end):
    first, second = bullets(CODE.format(fence=fence, end=end))
    assert first[2].split("\n")[2:4] == ["# a comment", "## a second one"]
    assert second[:3] == ("nex-2", "NEXT", "Next")


@pytest.mark.parametrize("fence, end", [("```", "x = 1"), ("````", "```"), ("```", "~~~"), ("```", "``` x")])
def test_code_that_never_ends_hides_no_section_and_no_bullet(fence, end):
    first, second = bullets(CODE.format(fence=fence, end=end))
    assert first[2].endswith("# a comment") and second[:3] == ("nex-2", "NEXT", "Next")


def test_a_title_of_the_next_playbook_belongs_to_no_bullet():
    text = "[a-1] helpful=1 harmful=0 :: One\n# no title: code\n\n# ACE Playbook: B\n\n## B\n[b-1] helpful=2 harmful=0 :: Two"
    assert [one[2] for one in bullets(text)] == ["One\n# no title: code", "Two"]


MALFORMED = {
    "no number": ("[a-1] helpful=x harmful=0 :: text", "helpful is no whole number"),
    "negative": ("[a-1] helpful=-1 harmful=0 :: text", "helpful is no whole number"),
    "fraction": ("[a-1] helpful=1.5 harmful=0 :: text", "helpful is no whole number"),
    "too many": ("[a-1] helpful=1 harmful=1234567890 :: text", "harmful is no whole number from 0 to 999,999,999"),
    "other digits": ("[a-1] helpful=٣ harmful=0 :: text", "helpful is no whole number"),
    "no harmful": ("[a-1] helpful=1 :: text", "without harmful="),
    "no separator": ("[a-1] helpful=1 harmful=0 text", "without :: before"),
    "cut short": ("[a-1] helpful=1 har", "without :: before"),
    "no id": ("[ ] helpful=1 harmful=0 :: text", "without an \\[id\\]"),
    "no brackets": ("helpful=1 harmful=0 :: text", "without an \\[id\\]"),
    "open bracket": ("[a-1 helpful=1 harmful=0 :: text", "without an \\[id\\]"),
    "no text": ("[a-1] helpful=1 harmful=0 ::  ", "without text"),
    "words": ("[a-1] helpful=1 and harmful=0 :: text", "votes are not name=number"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_bullet_is_named_and_takes_nothing_with_it(name):
    line, message = MALFORMED[name]
    text = f"[g-1] helpful=1 harmful=0 :: good\nmore\n{line}\n## S\n[g-2] helpful=1 harmful=0 :: good, too"
    problems = Problems()
    found, _ = parse(text, problems)
    assert [(one.content, one.section) for one in found] == [("good\nmore", "GENERAL"), ("good, too", "S")]
    [problem] = problems
    assert (problem.path, problem.line, problem.kind) == ("a.md", 3, "malformed")
    assert re.search(message, problem.message)


@pytest.mark.parametrize("times", [1, 5])
def test_a_bullet_that_is_too_long_is_skipped_alone(times):
    problems = Problems()
    long = "\n".join(["x" * 99] * (times * MOST_CHARACTERS // 99))
    found, _ = parse(f"[a-1] helpful=1 harmful=0 :: {long}\nmore\n## S\n[b-1] helpful=1 harmful=0 :: good", problems)
    assert [(one.content, one.section) for one in found] == [("good", "S")]
    assert problems.counts == {"too_long": 1}


def test_the_longest_bullet_is_read_as_it_was_written():
    content = "\n".join("x" for _ in range(MOST_CHARACTERS // 2))
    [found], _ = parse("\n".join(written([Bullet(id="a-1", section="S", content=content)])))
    assert found.content == content


def test_lines_below_a_skipped_line_belong_to_no_bullet(tmp_path):
    path = tmp_path / "a.md"
    path.write_bytes(
        b"[a-1] helpful=1 harmful=0 :: one\nmore\n[b-1] helpful=1 harmful=0 :: caf\xe9\nof b\n[c-1] helpful=1 harmful=0 :: two"
    )
    problems = Problems()
    parser = Parser(problems)
    assert [one.content for one in parser.parse(lines(str(path), problems))] == ["one\nmore", "two"]
    assert parser.outside == 1 and [str(one.line) for one in problems] == ["3"]


# --- what is written is read again -----------------------------------------------------------------------------------

PIECES = (
    "word", "two words", "", "  ", "    indented", "\tx", "## HEADER", "  ## header", "# title", "#!", "### deep", "##",
    "[x-1] helpful=1 harmful=2 :: bullet", "- [x-1] helpful=1 harmful=2 :: bullet", "[dec-NEW] :: bullet", "[x] y", "- [ ] to do",
    "[y helpful=3", "helpful=1 :: x", "```", "```python", "~~~", "````", "  ```", "\\", "\\# x", "\\\\## x", "\\[x-1] helpful=1",
    "\r", "\r\n", "\x0b", "\x1c", "\x85", "\u2028", "\u3000x", "\ufeff", "\0", "é", "日本語", "🎯", "::", "a :: b", "<!-- x -->", "|",
)  # fmt: skip
JOINTS = ("\n", "\n", "\n\n", " ", "", "\n  ")


def random_text(generator, most=8):
    return "".join(generator.choice(PIECES) + generator.choice(JOINTS) for _ in range(generator.randint(1, most)))


def random_bullets(seed):
    generator = random.Random(seed)
    found = []
    for number in range(generator.randint(0, 8)):
        content = normalised(random_text(generator)) or "text"
        section = section_name(random_text(generator, 2)) if generator.random() < 0.5 else "S"
        name = identifier(random_text(generator, 2)) or f"n-{number}"
        votes = [generator.choice((0, 1, 12, 999_999_999)) for _ in range(2)]
        found.append(Bullet(id=name, section=section, content=content, helpful=votes[0], harmful=votes[1]))
    return found


def key(one):
    return one.id, section_name(one.section), one.content, one.helpful, one.harmful


@pytest.mark.parametrize("start", range(0, 2000, 500))
def test_random_playbooks_are_read_as_they_were_written(tmp_path, start):
    for seed in range(start, start + 500):
        expected = random_bullets(seed)
        path, problems = tmp_path / "a.md", Problems()
        path.write_bytes("".join(f"{line}\n" for line in written(expected)).encode())
        found = list(Parser(problems).parse(lines(str(path), problems)))
        assert [key(one) for one in found] == [key(one) for one in expected], seed
        assert not problems, (seed, problems.text())


def test_random_texts_lose_no_bullet_and_end():
    for seed in range(1000):
        generator = random.Random(seed)
        marks = [f"[mark-{i}] helpful=1 harmful=0 :: mark {i}" for i in range(3)]
        text = "\n".join(part for mark in marks for part in (random_text(generator).replace("\r", ""), mark))
        found, _ = parse(text)
        assert [one.id for one in found if one.id.startswith("mark-")] == ["mark-0", "mark-1", "mark-2"], seed


def test_normal_forms_do_not_change_again():
    for seed in range(2000):
        text = random_text(random.Random(seed), 4)
        for normal in (normalised, section_name, identifier, domain_name):
            assert normal(normal(text)) == normal(text), (normal, text)


@pytest.mark.parametrize(
    "header, name",
    [
        ("strategies_and_insights", "STRATEGIES & INSIGHTS"),
        ("Strategies & Insights:", "STRATEGIES & INSIGHTS"),
        ("🎯 STRATEGIES AND INSIGHTS", "STRATEGIES & INSIGHTS"),
        ("**Problem-Solving** ", "PROBLEM SOLVING"),
        ("Task Decomposition (TSD)", "TASK DECOMPOSITION (TSD)"),
        ("🎯", "GENERAL"),
        ("", "GENERAL"),
    ],
)
def test_section_names_have_one_form(header, name):
    assert section_name(header) == name


@pytest.mark.parametrize(
    "value, name", [("Data Science", "data_science"), ("C++", "c++"), ("c#", "c#"), (" / ", "general")]
)
def test_domain_names_have_one_form(value, name):
    assert domain_name(value) == name


def test_many_titles_below_a_bullet_take_no_longer():
    begin = time.process_time()
    (found,) = parse("[a-1] :: Look first\n\n" + "# t\n\n" * 20_000)[0]
    assert found.content == "Look first"
    assert time.process_time() - begin < 3  # some 0.1 s; with quadratic code a minute
