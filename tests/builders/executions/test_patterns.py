"""What code uses is found on its syntax tree, not by words."""

from __future__ import annotations

import pytest

from capibara.builders.executions import patterns, syntax

pytest.importorskip("tree_sitter_sql")


def extract(language, code):
    return patterns.extract(syntax.parse(code, language))


PYTHON = {
    "function": "def f(): pass",
    "async": "async def f():\n    async for i in x: await i",
    "class": "class A: pass",
    "lambda": "f = lambda x: x",
    "decorator": "@d\ndef f(): pass",
    "loop": "while True: break",
    "comprehension": "{k: v for k, v in x}",
    "generator_expression": "sum(x for x in y)",
    "generator": "def f(): yield 1",
    "error_handling": "try: f()\nexcept E: pass",
    "raise": "raise ValueError",
    "context_manager": "with a as b: pass",
    "conditional": "x = 1 if y else 2",
    "match": "match x:\n    case 1: pass",
    "import": "from a.b import c",
    "format_string": "f'{x}'",
    "assertion": "assert x",
    "type_hint": "def f(x: int) -> str: pass",
    "docstring": "def f():\n    '''It is f.'''",
    "comment": "x = 1  # one",
    "slice": "x[1:2]",
    "unpacking": "a, *b = c",
    "assignment_expression": "if (n := 1): pass",
    "recursion": "def f(n): return f(n - 1)",
    "embedded_sql": "cur.execute('SELECT a FROM b WHERE c')",
    "magic": "%matplotlib inline\nx = 1",
}
JAVASCRIPT = {
    "function": "function f() {}",
    "lambda": "const f = x => x",
    "async": "async function f() { await g() }",
    "class": "class A {}",
    "loop": "for (const a of b) {}",
    "generator": "function* f() { yield 1 }",
    "error_handling": "try { f() } catch (e) {}",
    "raise": "throw e",
    "conditional": "x = a ? 1 : 2",
    "match": "switch (a) { case 1: break }",
    "import": "const fs = require('fs')",
    "export": "export const a = 1",
    "format_string": "`a${b}`",
    "unpacking": "const {a} = b",
    "optional_chaining": "a?.b",
    "promise": "f().then(g)",
    "recursion": "function f(n) { return f(n - 1) }",
    "iteration_method": "x.map(f)",
    "comment": "// a",
    "embedded_sql": "db.query('SELECT a FROM b WHERE c')",
}
SQL = {
    "select": "SELECT 1",
    "join": "SELECT a FROM b LEFT JOIN c ON b.i = c.i",
    "filter": "SELECT a FROM b WHERE c = 1",
    "group_by": "SELECT a FROM b GROUP BY a",
    "having": "SELECT a FROM b GROUP BY a HAVING count(*) > 1",
    "order_by": "SELECT a FROM b ORDER BY a",
    "limit": "SELECT a FROM b LIMIT 1",
    "distinct": "SELECT DISTINCT a FROM b",
    "aggregate": "SELECT count(*) FROM b",
    "subquery": "SELECT a FROM b WHERE c IN (SELECT d FROM e)",
    "common_table_expression": "WITH a AS (SELECT 1) SELECT * FROM a",
    "window_function": "SELECT rank() OVER (PARTITION BY a ORDER BY b) FROM c",
    "conditional": "SELECT CASE WHEN a = 1 THEN 2 END FROM b",
    "set_operation": "SELECT 1 UNION SELECT 2",
    "insert": "INSERT INTO a VALUES (1)",
    "update": "UPDATE a SET b = 1",
    "delete": "DELETE FROM a",
    "create_table": "CREATE TABLE a (b INT)",
    "create_index": "CREATE INDEX i ON a (b)",
    "create_view": "CREATE VIEW v AS SELECT 1",
    "alter_table": "ALTER TABLE a ADD COLUMN c INT",
    "drop": "DROP TABLE a",
    "transaction": "BEGIN; SELECT 1; COMMIT;",
    "foreign_key": "CREATE TABLE a (b INT REFERENCES c (d))",
    "comment": "SELECT 1 -- one",
}
ALL = [
    (language, name, code)
    for language, codes in (("python", PYTHON), ("javascript", JAVASCRIPT), ("sql", SQL))
    for name, code in codes.items()
]


@pytest.mark.parametrize(("language", "name", "code"), ALL)
def test_each_pattern_is_found(language, name, code):
    parsed = syntax.parse(code, language)
    assert parsed.error_share == 0
    assert patterns.extract(parsed).counts.get(name, 0) > 0


@pytest.mark.parametrize(("language", "name"), [("python", "x = 1"), ("javascript", "x = 1;"), ("sql", "SELECT 1")])
def test_plain_code_has_no_others(language, name):
    assert extract(language, name).counts == ({"select": 1} if language == "sql" else {})


def test_words_in_strings_and_comments_are_no_patterns():
    found = extract("python", "# for i in x: def f(): pass\ns = 'class A: while True: import os'\n")
    assert found.counts == {"comment": 1}


def test_names_are_found():
    found = extract(
        "python", "import os.path, numpy as np\nfrom a.b import c\nclass A:\n  def g(self): h(); self.k()\n"
    )
    assert (found.functions, found.classes, found.imports) == (("g",), ("A",), ("os", "numpy", "a"))
    assert found.calls == ("h", "k")
    found = extract("sql", "INSERT INTO a SELECT x FROM b JOIN s.c ON b.i = c.i; CREATE TABLE d (e INT)")
    assert set(found.tables) == {"a", "b", "c", "d"}
    assert extract("javascript", "import x from 'react'; const f = () => 1").functions == ("f",)


def test_patterns_are_counted():
    assert extract("python", "for i in a:\n  for j in b: pass\nwhile c: pass").counts == {"loop": 3}


def test_the_share_that_does_not_parse_is_measured():
    assert syntax.parse("x = 1", "python").error_share == 0
    assert 0 < syntax.parse("x = 1\ny = (2\nz = 3\n", "python").error_share < 1
    assert syntax.parse("SELEC * FORM t", "sql").error_share == 1
    assert syntax.parse("", "python").error_share == 0
    assert syntax.parse("x", "cobol") is None


def test_modulo_at_the_beginning_of_a_line_is_no_magic():
    parsed = syntax.parse("x = (a\n     % b)", "python")
    assert (parsed.magics, parsed.error_share) == (0, 0)


def test_lone_surrogates_do_not_stop_the_parser():
    assert syntax.parse("x = '\ud800'", "python").error_share == 0
