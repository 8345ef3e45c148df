"""The JSON forms of playbooks, and agents."""

from __future__ import annotations

import collections
import gzip
import json

import pytest

from capibara.builders.files.problems import Problems
from capibara.builders.playbooks import reading
from capibara.builders.playbooks.agents import Agent

BULLET = {"id": "a-1", "section": "S", "content": "Look first", "helpful": 3, "harmful": 1}
TEXT = "## S\n[a-1] helpful=3 harmful=1 :: Look first"


def read(tmp_path, value, name="a.json"):
    path, problems, counts = tmp_path / name, Problems(), collections.Counter()
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return list(reading.read(str(path), problems, counts)), problems, counts


def without(*names):
    return {name: value for name, value in BULLET.items() if name not in names}


FORMS = {
    "skills by id": {"skills": {"a-1": {**BULLET, "neutral": 0, "status": "active", "embedding": None}}, "sections": {"S": ["a-1"]},
                     "next_id": 2, "similarity_decisions": {}},
    "bullets by id": {"bullets": {"a-1": without("id")}, "sections": {"S": ["a-1"]}, "next_id": 2},
    "list": [BULLET],
    "list within": {"bullets": [BULLET], "version": "1.0"},
    "sections within": {"playbook": {"S": [without("section")], "empty": []}, "total_bullets": 1},
    "sections": {"S": [without("section")], "empty": []},
    "counts of sections": {"metadata": {"version": 1}, "sections": {
        "S": [{"id": "a-1", "content": "Look first", "helpful_count": 3, "harmful_count": 1.0}]}},
    "counters": {"a-1": {"content": "Look first", "section": "S", "counter": {"helpful": 3, "harmful": 1, "neutral": 0}}},
    "text": {"playbook": TEXT},
    "state": {"content": TEXT, "next_global_id": 2, "stats": {}},
    "of an agent": {"agent_id": "a", "graduation_score": 1, "playbook": {"bullets": [BULLET]}},
    "of agents": {"agents": {"a": {"success_rate": 1, "playbook": TEXT}}},
    "other name": [{"name": "a-1", "text": "Look first", "section": "S", "helpful": 3, "harmful": 1}],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_the_same_bullet(tmp_path, form):
    found, problems, _ = read(tmp_path, FORMS[form])
    assert not problems
    [bullet] = [one for one in found if not isinstance(one, Agent)]
    assert (bullet.id, bullet.section, bullet.content, bullet.helpful, bullet.harmful) == (
        "a-1",
        "S",
        "Look first",
        3,
        1,
    )
    assert bullet.agent == ("a" if "agent" in form else None)


def test_bullets_may_be_one_a_line_and_compressed(tmp_path):
    path, counts = tmp_path / "a.jsonl.gz", collections.Counter()
    lines = [
        BULLET,
        {**BULLET, "domain": "sql", "agent": "ann"},
        {**BULLET, "status": "invalid"},
        {**BULLET, "helpful": None},
    ]
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    found = list(reading.read(str(path), Problems(), counts))
    assert [(one.line, one.domain, one.agent, one.helpful) for one in found] == [
        (1, None, None, 3), (2, "sql", "ann", 3), (4, None, None, 0)]  # fmt: skip
    assert counts["bullets marked invalid"] == 1


MALFORMED = {
    "votes": ([BULLET, {**BULLET, "helpful": -1}], 2, "bullet 1 has in helpful no whole number"),
    "fraction": ([BULLET, {**BULLET, "helpful": 0.5}], 2, "bullet 1 has in helpful no whole number"),
    "truth": ([BULLET, {**BULLET, "harmful": True}], 2, "bullet 1 has in harmful no whole number"),
    "word": ({"bullets": {"a": {**BULLET, "helpful": "3"}, "b": BULLET}}, 1, "bullet 1 has in helpful no whole number"),
    "no text": ({"bullets": [BULLET, without("content")]}, 1, "bullet 2 has no text"),
    "blank": ({"bullets": [BULLET, {**BULLET, "content": " \n"}]}, 1, "bullet 2 has no text"),
    "too long": ({"bullets": [BULLET, {**BULLET, "content": "x" * 100_001}]}, 1, "bullet 2 has more than 100,000"),
    "no object": ({"bullets": [BULLET, "Look"]}, 1, "bullet 2 is no object"),
    "other record": ([BULLET, {"messages": [{"role": "user", "content": "x"}]}], 2, "no playbook, bullet or agent"),
    "other playbook": ([BULLET, {"playbook": {"a": 1}}], 2, "a playbook of another form"),
    "other agent": ({"agents": [{"agent": "x", "bullets": [BULLET]}, 3]}, 1, "an agent that is no object"),
    "rate": ({"agent": "x", "success_rate": 70, "bullets": [BULLET]}, 1, "success_rate is not from 0 to 1"),
    "score": ({"agent": "x", "graduation_score": "high", "bullets": [BULLET]}, 1, "graduation_score is no number"),
    "interactions": ({"agent": "x", "interactions": 1.5, "bullets": [BULLET]}, 1, "interactions are no whole number"),
    "expertise": (
        {"agent": "x", "domain_expertise": {"sql": "much"}, "bullets": [BULLET]},
        1,
        "domain_expertise is not",
    ),
    "nameless": ({"graduation_score": 1, "bullets": [BULLET]}, 1, "without agent_id or name"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_is_named_and_the_rest_is_read(tmp_path, name):
    value, line, message = MALFORMED[name]
    found, problems, _ = read(tmp_path, value)
    assert [one.content for one in found if not isinstance(one, Agent)] == ["Look first"]
    [problem] = problems
    assert (problem.line, problem.kind) == (line, "malformed") and message in problem.message


def test_agents_are_read(tmp_path):
    value = [
        {"agent_id": "ann", "graduation_score": 0.9, "interactions": 120, "success_rate": 0.75,
         "domain_expertise": {"sql": 0.9, "python": 0.4}, "playbook": "books/Ann.md"},
        {"name": "bob", "total_interactions": 3, "domain_expertise": ["ml", "api"]},
        {"id": 7, "success_rate": 1, "domain_expertise": "api", "graduation_score": None},
    ]  # fmt: skip
    found, problems, _ = read(tmp_path, value)
    assert not problems
    assert found == [
        Agent(name="ann", graduation_score=0.9, interactions=120, success_rate=0.75,
              expertise={"sql": 0.9, "python": 0.4}, playbook="books/Ann.md", line=1),
        Agent(name="bob", interactions=3, expertise={"ml": 1, "api": 1}, line=2),
        Agent(name="7", success_rate=1, expertise={"api": 1}, line=3),
    ]  # fmt: skip
    assert [one.strongest() for one in found] == ["sql", "api", "api"] and Agent(name="x").strongest() is None


def test_a_bullet_with_a_field_of_agents_is_a_bullet(tmp_path):
    found, problems, _ = read(tmp_path, [{**BULLET, "success_rate": 0.5}])
    assert [type(one).__name__ for one in found] == ["Bullet"] and not problems


def test_a_playbook_of_another_form_is_malformed(tmp_path):
    found, problems, _ = read(tmp_path, {"agent_id": "a", "graduation_score": 1, "playbook": 5})
    assert [one.name for one in found] == ["a"]
    assert [one.message for one in problems] == ["a playbook of another form"]
