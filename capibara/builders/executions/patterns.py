"""Finds what code uses: functions, loops, error handling, joins, window functions and so on, by queries on its syntax tree."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping

from capibara.builders.executions.syntax import Syntax

# Each capture is a pattern, except those that begin with "name.": the names that the code defines or uses.
_PYTHON = """
(function_definition name: (identifier) @name.function) @function
(function_definition "async") @async
(class_definition name: (identifier) @name.class) @class
(lambda) @lambda
(decorator) @decorator
[(for_statement) (while_statement)] @loop
[(for_statement "async") (with_statement "async") (for_in_clause "async") (await)] @async
[(list_comprehension) (set_comprehension) (dictionary_comprehension)] @comprehension
(generator_expression) @generator_expression
(yield) @generator
(try_statement) @error_handling
(raise_statement) @raise
(with_statement) @context_manager
[(if_statement) (conditional_expression)] @conditional
(match_statement) @match
[(import_statement) (import_from_statement)] @import
(import_statement name: (dotted_name) @name.import)
(import_statement name: (aliased_import name: (dotted_name) @name.import))
(import_from_statement module_name: (dotted_name) @name.import)
(string (interpolation)) @format_string
(assert_statement) @assertion
[(typed_parameter) (typed_default_parameter)] @type_hint
(function_definition return_type: (type)) @type_hint
(assignment type: (type)) @type_hint
(function_definition body: (block . (expression_statement (string)))) @docstring
(class_definition body: (block . (expression_statement (string)))) @docstring
(module . (comment)* . (expression_statement (string))) @docstring
(comment) @comment
(slice) @slice
[(list_splat) (dictionary_splat) (pattern_list) (list_splat_pattern)] @unpacking
(named_expression) @assignment_expression
(call function: (identifier) @name.call)
(call function: (attribute attribute: (identifier) @name.method))
"""
_JAVASCRIPT = """
(function_declaration name: (identifier) @name.function) @function
(generator_function_declaration name: (identifier) @name.function) @function
[(function_expression) (generator_function) (method_definition)] @function
(arrow_function) @lambda
(variable_declarator name: (identifier) @name.function value: [(arrow_function) (function_expression)])
[(function_declaration "async") (function_expression "async") (arrow_function "async")] @async
[(method_definition "async") (await_expression) (for_in_statement "await")] @async
(class_declaration name: (identifier) @name.class) @class
[(for_statement) (for_in_statement) (while_statement) (do_statement)] @loop
[(generator_function_declaration) (generator_function) (yield_expression)] @generator
(try_statement) @error_handling
(throw_statement) @raise
[(if_statement) (ternary_expression)] @conditional
(switch_statement) @match
(import_statement source: (string (string_fragment) @name.import)) @import
(call_expression function: (identifier) @_require arguments: (arguments (string (string_fragment) @name.import))
  (#eq? @_require "require")) @import
(export_statement) @export
(template_string (template_substitution)) @format_string
(spread_element) @unpacking
[(object_pattern) (array_pattern)] @unpacking
(optional_chain) @optional_chaining
(new_expression constructor: (identifier) @_promise (#eq? @_promise "Promise")) @promise
(call_expression function: (member_expression property: (property_identifier) @_then)
  (#any-of? @_then "then" "catch" "finally")) @promise
(comment) @comment
(call_expression function: (identifier) @name.call)
(call_expression function: (member_expression property: (property_identifier) @name.method))
"""
_SQL = """
(select) @select
[(join) (cross_join) (lateral_join) (lateral_cross_join)] @join
(where) @filter
(group_by) @group_by
(having) @having
(order_by) @order_by
(limit) @limit
(keyword_distinct) @distinct
(subquery) @subquery
(cte) @common_table_expression
(window_function) @window_function
(case) @conditional
(set_operation) @set_operation
(insert) @insert
(update) @update
(delete) @delete
(create_table) @create_table
(create_index) @create_index
(create_view) @create_view
(create_function) @function
(alter_table) @alter_table
[(drop_table) (drop_view) (drop_index)] @drop
(transaction) @transaction
(keyword_references) @foreign_key
[(comment) (marginalia)] @comment
(relation (object_reference name: (identifier) @name.table))
(create_table (object_reference name: (identifier) @name.table))
(insert (object_reference name: (identifier) @name.table))
(invocation (object_reference name: (identifier) @name.call))
"""
_QUERIES = {"python": _PYTHON, "javascript": _JAVASCRIPT, "sql": _SQL}
_AGGREGATES = frozenset(
    "count sum avg min max total median stddev stddev_pop stddev_samp variance var_pop var_samp array_agg string_agg "
    "group_concat json_agg jsonb_agg listagg bool_and bool_or every percentile_cont percentile_disc mode corr".split()
)
_ITERATION = frozenset("map filter reduce forEach flatMap some every find findIndex".split())
_EMBEDDED_SQL = re.compile(
    r"[\"']\s*(?:SELECT\s[\s\S]{1,2000}?\sFROM\s|INSERT\s+INTO\s|UPDATE\s+\w+\s+SET\s|DELETE\s+FROM\s|CREATE\s+TABLE\s)", re.IGNORECASE
)  # fmt: skip
_MOST_NAMES = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patterns:
    """What code uses.

    Attributes:
      counts: how often it has each pattern, such as "loop"; only patterns that it has.
      functions: the names of functions that it defines, in their order, each once; so the others.
      classes: of classes.
      imports: of the top modules that it imports.
      tables: of the tables that SQL names.
      calls: of the functions and methods that it calls.
    """

    counts: Mapping[str, int]
    functions: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()


def extract(syntax: Syntax) -> Patterns:
    """Finds the patterns of parsed code."""
    captured = syntax.captures(_QUERIES[syntax.language])
    counts = collections.Counter({name: len(nodes) for name, nodes in captured.items()})
    names: dict[str, tuple[str, ...]] = {}
    for name, nodes in captured.items():
        if name.startswith("name."):
            names[name.removeprefix("name.")] = tuple(dict.fromkeys(syntax.text(node) for node in nodes))
    calls = [syntax.text(node) for node in captured.get("name.call", ())]
    if syntax.language == "sql":
        counts["aggregate"] = sum(call.lower() in _AGGREGATES for call in calls)
    else:
        counts["recursion"] = _recursive_calls(syntax)
        counts["embedded_sql"] = len(_EMBEDDED_SQL.findall(syntax.source.decode()))
    if syntax.language == "javascript":
        counts["iteration_method"] = sum(syntax.text(node) in _ITERATION for node in captured.get("name.method", ()))
    counts["magic"] = syntax.magics
    is_path = syntax.language == "javascript"
    imports = dict.fromkeys(item if is_path else item.partition(".")[0] for item in names.get("import", ()))
    return Patterns(
        counts={name: count for name, count in sorted(counts.items()) if count and not name.startswith(("name.", "_"))},
        functions=names.get("function", ())[:_MOST_NAMES],
        classes=names.get("class", ())[:_MOST_NAMES],
        imports=tuple(imports)[:_MOST_NAMES],
        tables=names.get("table", ())[:_MOST_NAMES],
        calls=tuple(dict.fromkeys((*names.get("call", ()), *names.get("method", ()))))[:_MOST_NAMES],
    )


_DEFINED = {
    "python": "(function_definition name: (identifier) @name) @function",
    "javascript": "(function_declaration name: (identifier) @name) @function",
}
_CALLED = {
    "python": "(call function: (identifier) @call)",
    "javascript": "(call_expression function: (identifier) @call)",
}


def _recursive_calls(syntax: Syntax) -> int:
    """How often a function calls itself by its name."""
    functions = syntax.captures(_DEFINED[syntax.language]).get("function", [])
    spans: dict[str, list[tuple[int, int]]] = {}
    for function in functions:
        name = function.child_by_field_name("name")
        if name is not None:
            spans.setdefault(syntax.text(name), []).append((function.start_byte, function.end_byte))
    if not spans:
        return 0
    calls = syntax.captures(_CALLED[syntax.language]).get("call", [])
    return sum(any(start <= call.start_byte < end for start, end in spans.get(syntax.text(call), ())) for call in calls)
