"""What a text is labelled with, what the label rests on, and how sure it is."""

from __future__ import annotations

import pytest

from capibara.builders.routing.labelling import facts as analysis
from capibara.builders.routing.labelling.difficulty import Difficulty, Level
from capibara.builders.routing.labelling.domains import BUILT_IN, Domain, Outcome, resolved
from capibara.builders.routing.labelling.facts import Facts, nesting
from capibara.builders.routing.labelling.labels import Labels
from capibara.builders.routing.labelling.records import Malformed, Piece, PieceKind, RecordKind, read
from capibara.core.types import UserError

pytest.importorskip("tree_sitter_sql")

LABELS = Labels(tuple(BUILT_IN.values()))
FIELDS = ("source", "session", "task_id")


def facts_of(record: dict) -> Facts:
    draft = read(record, "here:1", FIELDS)
    text = "\n\n".join(piece.text for piece in draft.pieces)
    codes = analysis.codes(draft.pieces, ())
    about = {"declared": draft.declared, "outcome": draft.outcome, "attempts": draft.attempts}
    return Facts(text=text, codes=codes, earlier_imports=draft.imports, **about)


def label_of(record: dict | str, labels: Labels = LABELS) -> tuple[str, str, float] | None:
    label = labels.of(facts_of({"text": record} if isinstance(record, str) else record))
    return None if label is None else (label.domain, str(label.source), label.confidence)


def run(code: str, passed: bool = True, **about) -> dict:
    error = None if passed else {"name": "NameError", "value": "name 'x' is not defined", "traceback": ""}
    return {"code": code, "passed": passed, "source": "log.jsonl:3", "language": "python", "error": error, **about}


CHAT = {
    "messages": [{"role": "user", "content": "```python\nRequest(a).body\n```"}, {"role": "assistant", "content": "b"}],
    **{"kind": "explain", "language": "python", "quality": 1.0, "source": "log.jsonl:9"},
}
CASES = [
    ({"text": "x = 1\nprint(x)", "domain": "ML"}, ("ml", "declared", 1.0)),
    ({"text": "x = 1\nprint(x)", "domain": "machine_learning"}, ("ml", "declared", 1.0)),
    (run("import numpy\nx", passed=False), ("debug", "kind", 0.9)),
    ({"before": run("x", passed=False), "after": run("x = 1\nx"), "attempts": 2}, ("debug", "kind", 1.0)),
    (run("import numpy as np\nnp.zeros(3)"), ("ml", "imports", 0.85)),
    (run("import sklearn.svm\nimport pandas\nimport os"), ("ml", "imports", 0.9)),
    (run("import requests\nrequests.get(address).json()"), ("api", "imports", 0.85)),
    (run("from yarl import URL\nURL('/a')"), ("api", "imports", 0.85)),
    (run("np.zeros(3)", earlier_imports=["numpy"]), ("ml", "imports", 0.85)),
    (run("import pandas\npandas.Series(np.pi)", earlier_imports=["numpy", "os"]), ("ml", "imports", 0.9)),
    (run("np.zeros(3)", earlier_imports=["requests"], passed=False), ("debug", "kind", 0.9)),
    (CHAT | {"earlier_imports": ["webob"]}, ("api", "imports", 0.85)),
    ("const express = require('express');\nconst app = express();", ("api", "imports", 0.85)),
    ("fetch('https://a.example/api').then((reply) => reply.json());", ("api", "words", 0.75)),
    (run("for i in range(3):\n    print(i)"), ("python", "language", 1.0)),
    ({"text": "SELECT a FROM b", "language": "postgres"}, ("sql", "language", 1.0)),
    ("SELECT a, b FROM c WHERE d = 1", ("sql", "language", 0.9)),
    ("```js\nlet a = 1;\n```", ("javascript", "language", 0.95)),
    ("An overfitting neural network needs another learning rate and more epochs.", ("ml", "words", 0.8)),
    ({"text": "SELECT a FROM b", "language": "en"}, ("sql", "language", 0.9)),  # no language of code
]


@pytest.mark.parametrize(("record", "expected"), CASES, ids=range(len(CASES)))
def test_a_text_has_the_label_of_the_first_rule_that_holds(record, expected):
    assert label_of(record) == expected


def test_modules_of_two_domains_make_a_label_unsure():
    assert label_of(run("import numpy\nimport requests")) == ("api", "imports", 0.425)
    assert label_of(run("import numpy\nimport pandas\nimport requests"))[2] == pytest.approx(0.9 * 2 / 3)


def test_one_word_does_not_outweigh_the_language_of_code():
    assert label_of(run("print('https://example.com')"))[:2] == ("python", "language")
    assert label_of(run("print('GET /items https://example.com')"))[:2] == ("api", "words")


@pytest.mark.parametrize(("said", "expected"), [(0.5, 0.5), (7, 1.0), (-3, 0.0)])
def test_a_record_cannot_make_a_label_surer_than_sure(said, expected):
    assert label_of(run("x = 1", language_confidence=said)) == ("python", "language", expected)


def test_code_in_several_languages_belongs_to_most_of_it():
    text = "```python\ntotal = 1 + 2\nprint(total)\nprint(total)\n```\nand\n```sql\nSELECT 1\n```\n"
    domain, source, confidence = label_of(text)
    assert (domain, source) == ("python", "language") and 0.7 < confidence < 0.95


def test_languages_of_one_domain_count_together():
    text = "```js\nlet a = () => 1;\n```\n```ts\nlet a: number = 1;\n```\n```python\nprint('a', 'b', 12)\n```\n"
    domain, source, confidence = label_of(text)
    assert (domain, source) == ("javascript", "language") and 0.5 < confidence < 0.7


def test_nothing_speaks_for_a_domain():
    assert label_of("It rains, and the capybara sleeps beside the river.") is None
    assert label_of(run("ls -la", language="shell")) is None


def test_own_domains_have_own_rules():
    cooking = Domain(name="cooking", words=(r"\boven\b", r"\bdough\b"), languages=("recipe",))
    labels = Labels(resolved(["python", cooking]))
    assert label_of("Put the dough into the oven.", labels) == ("cooking", "words", 0.6667)
    assert label_of({"text": "bake", "language": "recipe"}, labels) is None  # "recipe" is not known to be code
    failed = run("x", passed=False)
    assert label_of(failed, labels)[:2] == ("python", "language")  # none of them takes failed runs
    takes = Domain(name="broken", outcomes=(Outcome.FAILED,))
    assert label_of(failed, Labels(resolved(["python", takes])))[:2] == ("broken", "kind")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: resolved(["python", "pyton"]), "'pyton' is no built-in domain: did you mean python?"),
        (lambda: resolved(["python", Domain(name="py")]), "both named 'py'"),
        (lambda: Domain(name="a b"), "Domain.name ('a b')"),
        (lambda: Domain(name="a", words=("(",)), "no usable regular expression"),
        (lambda: Domain(name="a", words=("(a+)+$",)), "no usable regular expression"),
        (lambda: Difficulty(medium=0.7), "Difficulty.medium (0.7)"),
        (lambda: Difficulty(size=-1.0), "must be at least 0"),
    ],
)
def test_wrong_settings_are_named(make, words):
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value) and "\n" not in str(error.value)


# --- records ---------------------------------------------------------------------------------------------------------


def test_records_of_a_session_share_an_origin():
    ran = read(run("x = 1", session="s1"), "f:1", FIELDS)
    fixed = read({"before": run("x", False, session="s1"), "after": run("y", session="s1")}, "g:2", FIELDS)
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "quality": 1.0}
    told = read({**chat, "kind": "fix", "language": "python", "source": "log.jsonl:9", "session": "s1"}, "h:3", FIELDS)
    assert ran.source == fixed.source == told.source == "log.jsonl#s1"
    assert {*ran.origins} & {*fixed.origins} & {*told.origins}
    assert told.outcome is Outcome.FIXED
    assert read(run("x", session="s2"), "f:2", FIELDS).origins != ran.origins
    assert read(run("x"), "f:2", FIELDS).source == "log.jsonl"  # without a session: the log


def test_a_chat_of_several_bullets_links_them():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = read({"messages": messages, "bullets": ["b1", "b2"], "domain": "sql"}, "f:1", FIELDS)
    bullet = read({"content": "Add an index.", "helpful": 1, "harmful": 0, "id": "b2"}, "g:1", FIELDS)
    assert {*bullet.origins} < {*chat.origins} and chat.declared == "sql"
    assert (chat.kind, bullet.kind) == (RecordKind.CHAT, RecordKind.BULLET)


def test_a_document_is_its_own_source_unless_it_names_one():
    assert read({"text": "a"}, "f:7", FIELDS).source == "f:7"
    named = read({"text": "a", "source": "page", "task_id": 5}, "f:8", FIELDS)
    assert (named.source, named.origins) == ("page", ("source page", "source 5"))
    assert read({"text": "a", "source": ["p", 1.5]}, "f:9", FIELDS).origins == ('source ["p",1.5]',)
    assert read({"text": "a", "source": None, "session": " "}, "f:7", FIELDS).source == "f:7"


def test_a_document_without_a_source_has_the_same_origin_in_another_file():
    one, other = (read({"text": "a"}, where, FIELDS) for where in ("f:7", "sub/f:8"))
    assert one.origins == other.origins != read({"text": "b"}, "f:7", FIELDS).origins


def test_a_fix_has_the_origins_of_both_runs():
    fixed = read({"before": run("x", False, session="s1"), "after": run("y", session="s2")}, "g:2", FIELDS)
    for session in ("s1", "s2"):
        assert {*read(run("z", session=session), "f:1", FIELDS).origins} < {*fixed.origins}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}]},
        {"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "say"}]},
        {"prompt": "ask", "completion": "say"},
        {"instruction": "ask", "output": "say"},
        {"question": "ask", "answer": "say"},
        {"prompt": "ask", "chosen": "say", "rejected": "no"},
    ],
)
def test_all_forms_of_conversations_are_read(record):
    draft = read({**record, "domain": "sql", "session": "s"}, "f:1", FIELDS)
    assert [piece.text for piece in draft.pieces] == ["ask", "say"]
    assert (draft.kind, draft.declared, draft.source) == (RecordKind.CHAT, "sql", "s")


def test_a_number_of_attempts_has_no_limit():
    record = {"before": run("x", False), "after": run("y"), "attempts": 10**400}
    assert Difficulty(size=0, patterns=0, nesting=0).of(facts_of(record)) == 1.0


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"title": "a"}, "has title, must have text"),
        ({"text": ""}, "text must be a text that is not empty"),
        ({"text": 3}, "text must be a text"),
        ({"text": "a", "domain": 3}, "domain must be a text"),
        ({"code": "x", "passed": "yes", "source": "f:1"}, "passed must be true or false"),
        ({"code": "x", "passed": True}, "source must be"),
        (run("x", earlier_imports="numpy"), "earlier_imports must be a list of texts"),
        (run("x", earlier_imports=[1]), "earlier_imports must be a list of texts"),
        ({"messages": [{"role": "user", "content": " "}, {"role": "assistant", "content": " "}]}, "empty"),
        ({"messages": 3}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, r"^messages\[0\]"),
        ({"question": "a"}, "^has no conversation"),
    ],
)
def test_what_is_malformed_is_said(record, words):
    with pytest.raises(Malformed, match=words):
        read(record, "f:1", FIELDS)


# --- difficulty ------------------------------------------------------------------------------------------------------


def test_difficulty_grows_with_size_patterns_nesting_and_attempts():
    code = "for i in range(3):\n    if i:\n        print([i, (i,)])\n"
    base = Difficulty().of(facts_of(run(code)))
    assert Difficulty().of(facts_of(run(code * 9))) > base
    assert (
        Difficulty().of(facts_of(run(f"def f():\n    try:\n        yield 1\n    except E:\n        pass\n{code}")))
        > base
    )
    assert Difficulty().of(facts_of(run(code, passed=False))) == pytest.approx(base + 0.2 / 4, abs=1e-4)
    assert (
        Difficulty().of(facts_of({"before": run(code, False), "after": run(code), "attempts": 9})) > base + 0.2 - 1e-4
    )


def test_difficulty_is_the_documented_mean():
    """3 lines with code, the patterns loop and conditional, nested 2 deep."""
    code = Piece(text="for i in a:\n    if i:\n        b\n", kind=PieceKind.CODE, language="python")
    facts = Facts(text=code.text, codes=analysis.codes([code], ()), attempts=1)
    assert facts.patterns == {"loop", "conditional"}
    expected = 0.3 * 0.26140 + 0.25 * 2 / 12 + 0.25 * 2 / 6 + 0.2 / 4
    assert Difficulty().of(facts) == pytest.approx(expected, abs=1e-4)
    assert Difficulty(size=0, patterns=0, nesting=0).of(facts) == 0.25
    assert Difficulty().of(Facts(text="word " * 1000, codes=())) == 0.3


def test_levels_have_limits():
    assert [Difficulty().level(value) for value in (0.0, 0.3, 0.55)] == [Level.EASY, Level.MEDIUM, Level.HARD]


@pytest.mark.parametrize(
    ("code", "depth"),
    [
        ("a = 1", 0),
        ("if a:\n\tif b:\n\t\tc\nd", 2),
        ("a = f(g([1, {2: 3}]))", 4),
        ("a = [\n                 1,\n]\nb", 1),
        ("print('(((')", 1),
        ("  a\n  b\n", 1),
    ],
)
def test_nesting_counts_indentation_or_brackets(code, depth):
    assert nesting(code) == depth
