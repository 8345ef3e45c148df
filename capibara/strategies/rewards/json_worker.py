"""The process in which answers are validated by JSON Schemas, with bounds on its memory.

`bounded_process` starts this file as a script. A request is a line of JSON on standard input, the answer a line on standard output:
whether the schema accepts the answer, or, without an answer, what is wrong with the schema: "" where nothing is. A regular expression of a
schema may take for ever: the process that asks ends this one then.
"""

from __future__ import annotations

import functools
import json
import math
import re
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

MEMORY_BYTES = 2**31  # of address space
_DATA = ("const", "enum", "default", "examples")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_FENCED = re.compile(r"```[ \t]*(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def main() -> None:
    """Answers requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the process that asks
    validator("{}").is_valid(None)  # loads what is loaded late, before there is a limit
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "answer" in request:
            print(json.dumps(accepts(request["schema"], request["answer"])), flush=True)
        else:
            print(json.dumps(mistake(request["schema"])), flush=True)


def accepts(schema: str, answer: str) -> bool:
    """Whether an answer is JSON that the schema accepts, alone or in its only fenced code block."""
    blocks = _FENCED.findall(answer)
    try:
        value = json.loads(
            blocks[0] if len(blocks) == 1 else answer,
            parse_constant=_finite,
            parse_float=_finite,
            object_pairs_hook=_without_duplicates,
        )
        return validator(schema).is_valid(value)
    except Exception:  # of the parser, or of arithmetic with numbers that no float has
        return False


def mistake(schema: str) -> str:
    """What is wrong with a schema, in a line; empty: nothing."""
    try:
        checked = validator(schema)
        checked.is_valid(None)
        whole = json.loads(schema)
        resolver = _resolver(whole)
        for keyword, value in _keywords(whole):
            if keyword == "pattern" and isinstance(value, str):
                re.compile(value)
            if keyword == "patternProperties" and isinstance(value, dict):
                [re.compile(pattern) for pattern in value]
            if keyword == "$ref" and isinstance(value, str) and resolver is not None:
                resolver.lookup(value)
    except Exception as error:  # of the parser, the meta-schema, a reference that leads nowhere
        return (str(error).splitlines() or [type(error).__name__])[0][:200]
    return ""


@functools.lru_cache(256)
def validator(text: str) -> Any:
    """The validator of a schema, whose own `$schema` names the draft."""
    import jsonschema
    import referencing

    schema = json.loads(text)
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    # An empty registry: a schema of the data must not have this process open addresses.
    return kind(schema, registry=referencing.Registry())


def _resolver(schema: object) -> Any:
    """What looks up a schema's references; None: it has an inner `$id`, from which some may begin: validation follows those."""
    import referencing.jsonschema

    if not isinstance(schema, dict) or any(key == "$id" for value in schema.values() for key, _ in _keywords(value)):
        return None
    draft = referencing.jsonschema.DRAFT202012
    resource = referencing.Resource.from_contents(schema, default_specification=draft)
    uri = schema.get("$id", "")
    return referencing.Registry().with_resource(uri, resource).resolver(uri)


def _keywords(schema: object, has_names: bool = False) -> Iterator[tuple[str, Any]]:
    """All keywords of a schema with their values, without those in data; `has_names`: it is an object of schemas by name."""
    if isinstance(schema, list):
        for item in schema:
            yield from _keywords(item)
    if isinstance(schema, dict):
        for key, item in schema.items():
            if has_names:
                yield from _keywords(item)
            elif key not in _DATA:
                yield key, item
                yield from _keywords(item, key in _BY_NAME)


def _finite(number: str) -> float:
    """A number of JSON that a float has; NaN and Infinity are no JSON, 1e400 would become infinite."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not JSON, or no float")
    return value


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key comes twice")
    return result


if __name__ == "__main__":
    main()
