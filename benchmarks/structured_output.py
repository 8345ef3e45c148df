"""Structured output: what schemas compile, which documents they allow, texts of a random model, and time a token.

    python benchmarks/structured_output.py --suite=JSON-Schema-Test-Suite/tests/draft2020-12 \
        [--suite=jsonschemabench/maskbench/data] [--suite=schemastore/src/schemas/json] [--openapi=stripe/openapi/spec3.json] \
        [--most=1000] [--xgrammar_python=PATH/bin/python] \
        [--model=smollm2.gguf] [--schemas=200] [--texts=10] [--slots=8] [--rounds=5] [--json=OUT]

  documents  each schema of the suites is compiled, and each of its documents tried, by ours and by xgrammar in an environment
             of its own. `wrong` documents are invalid ones that a grammar allows; `missed` are valid ones that it does not.
  texts      a random model with the tokenizer of `--model` writes `--texts` texts for each of `--schemas` schemas; those that
             end by themselves are checked by the jsonschema package. Goal: none invalid.
  time       `--slots` rows of `--model` with a grammar, and the same rows without, in turns. Goal: at most 1.10 a token.

A suite is a folder of JSON files: lists of groups as in the JSON Schema Test Suite, a group each as in jsonschemabench, or a
schema each, without documents, as in the JSON Schema Store. Of an OpenAPI document each of its components is a schema.
Texts that reach their limit are counted apart: they have not ended, and are no documents yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jsonschema  # noqa: E402
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import capibara as cb  # noqa: E402
from capibara.core.types import UserError  # noqa: E402
from capibara.data.tokenizers.vocabulary import ByteVocabulary, Vocabulary  # noqa: E402
from capibara.inference.engine.engine import Engine, EngineConfig  # noqa: E402
from capibara.inference.engine.requests.stream import Finish  # noqa: E402
from capibara.inference.grammars.matcher import Grammars  # noqa: E402
from capibara.inference.sampling.grammar import Grammar  # noqa: E402
from capibara.inference.sampling.sampling import Sampling  # noqa: E402
from capibara.models import api  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
TIMED = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "score": {"type": "number"},
    },
    "required": ["name", "tags", "score"],
    "additionalProperties": False,
}


def groups(folder: str, most: int) -> list[dict[str, Any]]:
    """The schemas of a suite with their documents, at most so many, spread over its files."""
    found: list[dict[str, Any]] = []
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        found += [group for group in map(_group, content if isinstance(content, list) else [content]) if group]
    return _spread(found, most)


def _group(content: Any) -> dict[str, Any] | None:
    """A schema with its documents."""
    if not isinstance(content, dict):
        return None
    if "schema" in content and "tests" in content:
        return content
    return {"schema": content, "tests": []} if "$schema" in content else None


def _spread(found: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    return found if len(found) <= most else [found[i * len(found) // most] for i in range(most)]


def components(path: str, most: int) -> list[dict[str, Any]]:
    """The schemas of an OpenAPI document's components, each with those that it refers to."""
    schemas = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["components"]["schemas"]
    plain = {name: _plain(schema) for name, schema in schemas.items()}
    found = []
    for name in sorted(plain):
        reached, left = dict[str, Any](), [name]
        while left:
            at = left.pop()
            if at not in reached and at in plain:
                reached[at] = plain[at]
                left += re.findall(r'"#/\$defs/([^"/]+)"', json.dumps(plain[at]))
        found.append({"schema": {"$ref": f"#/$defs/{name}", "$defs": reached}, "tests": []})
    return _spread(found, most)


def _plain(value: Any) -> Any:
    """A schema of OpenAPI 3.0 as JSON Schema has it."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    schema = {
        key: _plain(item)
        for key, item in value.items()
        if key not in ("discriminator", "xml", "example", "externalDocs")
    }
    if isinstance(schema.get("$ref"), str):
        schema["$ref"] = schema["$ref"].replace("#/components/schemas/", "#/$defs/")
    for bound, key in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(exclusive := schema.get(key), bool):
            del schema[key]
            if exclusive:
                schema[key] = schema.pop(bound)
    if schema.pop("nullable", False) is True:
        return {"anyOf": [schema, {"type": "null"}]}
    return schema


def documents(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What our grammars say of each schema's documents."""
    vocabulary = ByteVocabulary()
    grammars, counts = Grammars(vocabulary), dict.fromkeys(("schemas", "compiled", "right", "wrong", "missed"), 0)
    took_s: list[float] = []
    for group in schemas:
        counts["schemas"] += 1
        began_s = time.perf_counter()
        try:
            grammar = Grammar(json_schema=json.dumps(group["schema"]))
            grammars.matcher(grammar)
        except UserError:
            continue
        took_s.append(time.perf_counter() - began_s)
        counts["compiled"] += 1
        for test in group["tests"]:
            allowed = allows(grammars, grammar, vocabulary, json.dumps(test["data"], ensure_ascii=False))
            counts["right" if allowed == test["valid"] else "wrong" if allowed else "missed"] += 1
    return counts | {"slowest_s": max(took_s, default=0.0), "median_s": statistics.median(took_s or [0.0])}


def allows(grammars: Grammars, grammar: Grammar, vocabulary: Vocabulary, text: str) -> bool:
    """Whether a text is one that the grammar can write."""
    matcher, row = grammars.matcher(grammar), np.zeros(-(-vocabulary.size // 32), np.uint32)
    ends = frozenset({vocabulary.eos_id})
    for token in (*vocabulary.encode(text), vocabulary.eos_id):
        try:
            matcher.allow(row, ends)
        except UserError:
            return False
        if not row[token // 32] >> (token % 32) & 1:
            return token == vocabulary.eos_id and matcher.complete
        if token != vocabulary.eos_id:
            matcher.accept(token)
    return True


def of_peer(python: str, schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same, of xgrammar."""
    command = [python, str(HERE / "peers" / "xgrammar_documents.py")]
    done = subprocess.run(command, input=json.dumps(list(schemas)), capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def random_model(vocabulary: Vocabulary, length: int, slots: int) -> Engine:
    """A small random decoder with this vocabulary."""
    sizes = dict(embed_dim=32, num_layers=1, num_heads=2, mlp_dim=32, dtype="float32", vocab_size=vocabulary.size)
    model = api.build(api.DecoderConfig(**sizes))
    return Engine(model, jax.jit(model.init)(jax.random.key(0)), vocabulary, length, EngineConfig(slots=slots))


def texts(
    vocabulary: Vocabulary, schemas: Sequence[dict[str, Any]], count: int, each: int, slots: int
) -> dict[str, int]:
    """Texts of a random model, and how many of those that ended are no documents of their schemas."""
    engine, counts = (
        random_model(vocabulary, 512, slots),
        dict.fromkeys(("schemas", "texts", "ended", "cut", "invalid"), 0),
    )
    # So that a random model closes what it opens.
    closing = {
        token: 8.0
        for token, piece in enumerate(vocabulary.pieces)
        if piece[:1] in (b'"', b"}", b"]") and len(piece) <= 3
    }
    sampling = Sampling(temperature=1.0, max_new_tokens=400, logit_bias=dict([*closing.items()][:1000]))
    for schema in usable(vocabulary, schemas):
        if counts["schemas"] == count:
            break
        counts["schemas"] += 1
        asked = [with_schema(sampling, schema, seed) for seed in range(each)]
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
        for stream in [engine.submit("x", one) for one in asked]:
            completion = stream.result()
            counts["texts"] += 1
            counts["cut"] += completion.finish is Finish.LENGTH
            if completion.finish is Finish.STOP:
                counts["ended"] += 1
                if not is_valid(validator, completion.text):
                    counts["invalid"] += 1
                    print("invalid:", completion.text[:500], "of", json.dumps(schema)[:500], flush=True)
    return counts


def usable(vocabulary: Vocabulary, schemas: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The schemas that compile and that jsonschema knows, in an order that is always the same."""
    grammars, order = Grammars(vocabulary), list(schemas)
    random.Random(1).shuffle(order)
    for group in order:
        schema = group["schema"]
        try:
            grammars.matcher(Grammar(json_schema=json.dumps(schema)))
            kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            kind.check_schema(schema)
        except (UserError, jsonschema.SchemaError):
            continue
        yield schema


def with_schema(sampling: Sampling, schema: Any, seed: int) -> Sampling:
    """A sampling whose text follows a schema."""
    return dataclasses.replace(sampling, seed=seed, grammar=Grammar(json_schema=json.dumps(schema)))


def is_valid(validator: Any, text: str) -> bool:
    """Whether a text is a document of the validator's schema."""
    try:
        return validator.is_valid(json.loads(text))
    except ValueError:
        return False


def timed(path: str, slots: int, rounds: int) -> dict[str, float]:
    """Seconds a token of rows with a grammar and of rows without, and their ratio."""
    model = cb.load(path)
    config = EngineConfig(slots=slots, decode_steps=1)
    engine = Engine(model.model, model.params, model.tokenizer, 512, config)
    free = Sampling(temperature=0.0, max_new_tokens=48, min_new_tokens=48)
    bound = with_schema(free, {"type": "array", "items": {"type": "string"}, "minItems": 100}, 0)
    seconds: dict[str, list[float]] = {"free": [], "bound": []}
    for turn in range(rounds + 1):
        for name, sampling in (("free", free), ("bound", bound)):
            streams = [engine.submit(f"Row {row} as JSON:", sampling) for row in range(slots)]
            completions = [stream.result() for stream in streams]
            if turn:
                last = max(one.elapsed_s for one in completions) - max(one.waited_s for one in completions)
                seconds[name].append(last / 47)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return medians | {"ratio": medians["bound"] / medians["free"]}


def main() -> int:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", default=[])
    parser.add_argument("--openapi", action="append", default=[])
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--xgrammar_python")
    parser.add_argument("--model")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--texts", type=int, default=10)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    table = Table(title="documents of the suites")
    for name in ("suite", "of", "schemas", "compiled", "right", "wrong", "missed", "median s", "slowest s"):
        table.add_column(name)
    every: list[dict[str, Any]] = []
    for folder in (*args.suite, *args.openapi):
        schemas = (components if folder in args.openapi else groups)(folder, args.most)
        every += schemas
        results[folder] = {"capibara": documents(schemas)}
        if args.xgrammar_python:
            results[folder]["xgrammar"] = of_peer(args.xgrammar_python, schemas)
        for who, row in results[folder].items():
            values = (row[key] for key in ("schemas", "compiled", "right", "wrong", "missed"))
            times = (f"{row[key]:.4f}" for key in ("median_s", "slowest_s"))
            table.add_row(os.path.basename(os.path.normpath(folder)), who, *map(str, values), *times)
    console = Console(width=140)
    console.print(table)
    if args.model:
        if every:
            vocabulary = cb.load(args.model).tokenizer
            results["texts"] = texts(vocabulary, every, args.schemas, args.texts, args.slots)
            console.print(results["texts"])
        results["time"] = timed(args.model, args.slots, args.rounds)
        console.print(results["time"])
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
