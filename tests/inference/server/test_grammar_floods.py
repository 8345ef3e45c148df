"""Grammars that would take long or much memory, through every parameter that takes one: each is answered soon, others too."""

from __future__ import annotations

import json
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.inference.server.test_server import GREEDY, HELLO, Running
from tests.inference.server.test_tool_choice import served_with

TEXT = {"type": "string"}


def nested(count, wrap, inner):
    for _ in range(count):
        inner = wrap(inner)
    return inner


def patterns(count, name="^x.*{0}.*y{0}$"):
    return {"type": "object", "patternProperties": {name.format(number): TEXT for number in range(count)}}


def referred(schema, count):
    """A schema that is joined with `count` others."""
    each = [{"allOf": [{"$ref": "#/$defs/p"}, {"properties": {f"a{number}": TEXT}}]} for number in range(count)]
    return {"$defs": {"p": schema}, "anyOf": each}


SCHEMAS = {
    "patterns": patterns(300),
    "plain patterns": patterns(1000, "^x{0}_"),
    "patterns of counts": patterns(128, "^x[a-z]{{1,200}}{0}[a-z]{{1,200}}y$"),
    "patterns of many objects": {"prefixItems": [patterns(64, f"^x.*{{0}}.*y{k}$") for k in range(50)]},
    "patterns that are joined": {"allOf": [patterns(8, f"^x.*{{0}}.*y{k}$") for k in range(16)]},
    "patterns that are referred to": referred(patterns(64), 40),
    "few patterns that are joined often": referred(patterns(8), 300),
    "patterns beside properties": patterns(60) | {"properties": {f"p{number}": TEXT for number in range(900)}},
    "patterns that overlap": patterns(12, ".*{0}.{{12}}"),
    "alternatives of alternatives": nested(9, lambda x: {"anyOf": [x, {"type": "array", "items": x}]}, TEXT),
    "products": {"allOf": [{"anyOf": [{"properties": {f"{i} {k}": TEXT}} for k in range(4)]} for i in range(10)]},
    "doubling": {"$defs": {f"d{i}": {"allOf": 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)} | {"d40": TEXT}, "$ref": "#/$defs/d0"},
    "itself": {"allOf": [{"$ref": "#"}]},
    "each other": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "without an end": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    "many items": {"type": "array", "items": {"type": "null"}, "minItems": 10**6},
    "items of items": nested(4, lambda x: {"type": "array", "items": x, "maxItems": 5000}, TEXT),
    "a long text": {"type": "string", "minLength": 10**9},
    "a pattern that explodes": {"type": "string", "pattern": "^(a|b)*a(a|b){40}$"},
    "a pattern and a length": {"type": "string", "pattern": "(ab|a|b)+c*", "minLength": 500},
    "patterns of a text": {"allOf": [{"type": "string", "pattern": f"{letter}.{{20}}"} for letter in "abcde"]},
    "a long enum": {"enum": ["x" * 10**5]},
    "many objects": {"enum": [{f"k{k}": i for k in range(20)} for i in range(400)]},
    "optional properties": {"properties": {f"p{i}": {"type": "integer"} for i in range(900)}, "additionalProperties": False},
    "properties of properties": {"properties": {f"p{i}": {"properties": {f"q{k}": TEXT for k in range(60)}} for i in range(60)}},
    "alternatives that overlap": {"oneOf": [{"properties": {f"a{i}": TEXT}, "required": [f"a{i}"]} for i in range(200)]},
    "objects by their kind": {"oneOf": [{"properties": {"k": {"const": f"{i}"}}, "required": ["k"]} for i in range(800)]},
    "negations": nested(30, lambda x: {"not": x}, TEXT),
    "conditions": nested(8, lambda x: {"if": {"const": 1}, "then": x, "else": x}, TEXT),
    "conditions beside each other": {"allOf": [{"if": {"required": [f"a{i}"]}, "then": {"required": [f"b{i}"]}} for i in range(40)]},
    "names that need others": {"dependentRequired": {f"a{i}": [f"a{i + 1}"] for i in range(200)}},
    "one of many names": {"oneOf": [{"required": [f"a{i}"]} for i in range(100)]},
    "one of nothing that is known": {"oneOf": 60 * [{"type": "object", "required": [f"a{k}" for k in range(900)]}]},
    "nothing unevaluated": {"$ref": "#/$defs/d0", "unevaluatedProperties": False, "$defs": {f"d{i}": {"allOf": 60 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(9)} | {"d9": {}}},
    "many that contain": {"allOf": [{"contains": {"const": i}, "maxContains": 3} for i in range(20)]},
    "not a long text": {"not": {"enum": ["a" * 5000]}},
    "remainders": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (2, 3, 5, 7, 11, 13, 17)]},
    "the least number": {"type": "number", "multipleOf": 5e-324},
    "wide ranges": {"type": "number", "minimum": -123456789.987654321, "maximum": 987654321.123456789},
    "lengths": {"type": "string", "minLength": 5, "maxLength": 3},
    "two types": {"allOf": [{"type": "string"}, {"type": "number"}]},
    "an item that cannot be": {"properties": {"a": {"minItems": 3, "maxItems": 2, "type": "array"}}, "required": ["a"]},
    "a property that cannot be": {"properties": {"a": False}, "required": ["a"]},
    "deep lists": nested(100, lambda x: {"type": "array", "items": x}, TEXT),
    "a deep constant": {"const": nested(50, lambda x: [x], 1)},
    "a file": {"$ref": "file:///etc/passwd"},
    "a host": {"$ref": "http://169.254.169.254/latest"},
    "a long name": {"$defs": {"a" * 5000: TEXT}, "$ref": "#/$defs/" + "a" * 5000},
    "long tuples": {"type": "array", "prefixItems": [{"enum": list(range(50))}] * 200, "items": False},
    "formats": {"prefixItems": [{"type": "string", "format": f} for f in ("email", "uri", "ipv6", "date-time")] * 100},
}  # fmt: skip
REGEXES = {
    "counts of counts": "((a{0,100}){0,100}){0,100}",
    "counts of classes": "(([a-z]{1,60}){1,60}){1,60}x",
    "a large count": "a{4000000000}",
    "the n-th letter from the end": ".*a.{30}",
    "several letters from the end": "|".join(
        f".*{letter}.{{{at + 8}}}" for at, letter in enumerate("abcdefghijklmnop")
    ),
    "optional letters": "a?" * 3000 + "a" * 3000,
    "groups": "(" * 2000 + "a" + ")*" * 2000,
    "letters of all scripts": r"[\p{L}\p{N}]{1,2000}",
    "classes": "".join(f"[^{letter}]*" for letter in "abcdefghijklmnopqrstuvwxyz"),
    "words": "|".join(f"w{number}x*y" for number in range(8000)),
    "stars": "(((((((((a*)*)*)*)*)*)*)*)*)*b",
    "a look ahead": "(?=a*)*b",
    "no letter": r"[^\s\S]",
}
RULES = {
    "left recursion": 'start: start "a" | "a"',
    "ambiguity": 'start: e\ne: e e | e e e | "a" | ""',
    "empty loops": "start: a\na: b a | \nb: a b | ",
    "many rules": "start: r0\n" + "\n".join(f'r{i}: "k{i}" r{(i * 7 + 1) % 1500}?' for i in range(1500)),
    "doubling": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"',
    "doubling terminals": "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "ab"',
    "deep rules": "start: " + "(" * 3000 + '"a"' + ")" * 3000,
    "deep GBNF": "root ::= " + "(" * 3000 + '"a"' + ")*" * 3000,
    "schemas in rules": "start: "
    + " | ".join(f"%json {json.dumps(patterns(30, f'^x.*{{0}}.*y{k}$'))}" for k in range(40)),
    "an intersection": "start: T\nT: "
    + " & ".join(f"/(.*{letter}.{{{at + 2}}})*/" for at, letter in enumerate("abcdefghijklm")),
    "an intersection of long ones": "start: T\nT: " + " & ".join(f"/(.*{letter}.{{60}})*/" for letter in "abcd"),
    "complements": "start: T\nT: " + " & ".join(f"~/(.*{letter}.{{20}})*/" for letter in "abcdef"),
    "a terminal that explodes": "start: T\nT: /(a|b)*a(a|b){28}/",
}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def ways(schema):
    """Paths and bodies that ask for a schema."""
    asked, named = GREEDY | {"messages": HELLO}, {"name": "n", "schema": schema}
    tool = {"type": "function", "function": {"name": "call", "parameters": schema}}
    anthropic = {"name": "call", "input_schema": schema if "type" in schema else {"type": "object", **schema}}
    return {
        "guided_json": (COMPLETION, GREEDY | {"prompt": "x", "guided_json": schema}),
        "structured_outputs": (COMPLETION, GREEDY | {"prompt": "x", "structured_outputs": {"json": schema}}),
        "response_format": (CHAT, asked | {"response_format": {"type": "json_schema", "json_schema": named}}),
        "tools": (CHAT, asked | {"tools": [tool], "tool_choice": "required"}),
        "a stream": (CHAT, asked | {"guided_json": schema, "stream": True}),
        "responses": ("/v1/responses", {"model": "tiny", "input": "x", "text": {"format": {"type": "json_schema", **named}}, "max_output_tokens": 8}),
        "messages": ("/v1/messages", {"model": "tiny", "messages": HELLO, "max_tokens": 8, "output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        "tools of messages": ("/v1/messages", {"model": "tiny", "messages": HELLO, "max_tokens": 8, "tools": [anthropic], "tool_choice": {"type": "any"}}),
    }  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    served = served_with(tmp_path_factory.mktemp("flood"), "hermes")
    with served.engine.start(), Running(served) as one:
        for path, body in ways({"type": "object", "properties": {"a": {"type": "integer"}}}).values():
            assert send(one, path, body) in (200, 400)  # compiles what they all need
        yield one


def send(running, path, body):
    return running.http("POST", path, json.dumps(body))[0]


def check(running, name, path, body, statuses=(200, 400)):
    """A request is answered after at most 2 s of CPU time and with at most 256 MiB more, and others meanwhile."""
    began_s, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done, others = threading.Event(), []

    def ask_others():
        while not done.is_set():
            others.append(send(running, COMPLETION, GREEDY | {"prompt": "The river", "max_tokens": 1}))
            done.wait(0.2)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_others)
        try:
            status = send(running, path, body)
        finally:
            done.set()
        asked.result()
    took_s, mib = time.process_time() - began_s, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert status in statuses and {*others} <= {200}, (name, status, others)
    assert took_s < 2 + 0.1 * len(others) and mib < 256, (name, took_s, mib)


FEW = ("patterns", "plain patterns", "patterns that are referred to")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.heavy) for name in SCHEMAS]
)
def test_a_schema_holds_up_nobody(running, name):
    for way, (path, body) in ways(SCHEMAS[name]).items():
        check(running, f"{name} by {way}", path, body)


@pytest.mark.heavy
@pytest.mark.parametrize("name", [*REGEXES, *RULES])
def test_regular_expressions_and_rules_hold_up_nobody(running, name):
    kind, value = ("regex", REGEXES[name]) if name in REGEXES else ("grammar", RULES[name])
    for options in ({f"guided_{kind}": value}, {"structured_outputs": {kind: value}}):
        check(running, name, COMPLETION, GREEDY | {"prompt": "x"} | options)
