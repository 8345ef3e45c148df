"""The grammar that a request asks for, in OpenAI's and in vLLM's parameters."""

from __future__ import annotations

import json
from typing import Any

from capibara.core.types import UserError
from capibara.inference.sampling.grammar import Grammar
from capibara.inference.server.service.bounds import brief, quoted
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served

# vLLM's parameters, and what they are here. It reads its grammars in GBNF or in Lark's notation.
_GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "lark", "guided_choice": "choice"}
_STRUCTURED = {name.removeprefix("guided_"): field for name, field in _GUIDED.items()}


def grammar_of(values: dict[str, Any], served: Served) -> Grammar | None:
    """The grammar of a request, compiled, so that the engine has it at once; None: it asks for none.

    Args:
      values: its `ApiRequest.structured`; None: not set.
      served: the model.

    Raises:
      Refusal: a value is malformed, there are several, or the grammar cannot be used.
    """
    asked = {name: value for name, value in values.items() if value is not None}
    each = {name: fields for name, value in asked.items() if (fields := _fields(name, value))}
    if len(each) > 1:
        raise Refusal(400, f"{' and '.join(each)} are set: a text can follow one of them", param=[*each][1])
    for name, fields in each.items():
        return checked(fields, name, served)
    return None


def checked(fields: dict[str, Any], param: str, served: Served) -> Grammar:
    """The grammar with these fields, compiled.

    Raises:
      Refusal: it cannot be used; the error names the request's parameter.
    """
    try:
        grammar = Grammar(**fields)
        served.engine.check(grammar)
    except UserError as error:
        raise Refusal(400, f"{param}: {quoted(str(error))}", param=param, code="invalid_grammar") from None
    return grammar


def _fields(name: str, value: object) -> dict[str, Any]:
    """The field of `Grammar` that a parameter sets."""
    if name == "response_format":
        return _of_format(value)
    if name == "structured_outputs":
        if not isinstance(value, dict) or len(value) != 1 or not set(value) <= set(_STRUCTURED):
            raise _malformed(name, value, f"be an object with one of {', '.join(_STRUCTURED)}")
        ((key, value),) = value.items()
        name = f"guided_{key}"
    field = _GUIDED[name]
    if field == "json_schema":
        return {field: _schema(name, value)}
    if field == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise _malformed(name, value, "be a list of strings with text")
        return {field: tuple(value)}
    if not isinstance(value, str):
        raise _malformed(name, value, "be a string")
    return {field: value}


def _of_format(value: Any) -> dict[str, Any]:
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": True}
    if kind != "json_schema":
        raise _malformed(name, value, "have the type 'text', 'json_object' or 'json_schema'")
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or inner.get("schema") is None:
        raise _malformed(
            name, value, 'have a schema: {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
        )
    return {"json_schema": _schema(name, inner["schema"])}


def _schema(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise _malformed(name, value, "be a JSON Schema, an object")
    return json.dumps(value)


def _malformed(name: str, value: object, must: str) -> Refusal:
    return Refusal(400, f"{name} is {brief(value)}, must {must}", param=name, code="invalid_value")
