"""The language of code is found, with how sure that is."""

from __future__ import annotations

import pathlib
import random
import sysconfig
import time

import pytest

from capibara.builders.executions.languages import Source, detect

pytest.importorskip("tree_sitter_sql")
CODE = {
    "python": [
        "x = 1\nprint(x)",
        "import os\nprint(os.getcwd())",
        "for i in range(3):\n    print(i)",
        "!pip install x\nimport x\n%matplotlib inline",
        "def f(x):\n  return x +",
        "a = [i for i in b]",
        "cur.execute('SELECT a FROM b WHERE c = 1')",
        "x = {'a': 1}",
        "1 + 1",
    ],
    "javascript": [
        "console.log(1)",
        "const a = [1, 2].map(x => x * 2);\nconsole.log(a)",
        "function f(a){ return a + 1 }\nf(2)",
        "let x = 5",
        "if (x) { y() }",
    ],
    "sql": [
        "SELECT * FROM t WHERE a = 1",
        "select a, count(*) from t group by a",
        "UPDATE t SET a = 1;",
        "WITH a AS (SELECT 1) SELECT * FROM a",
        "CREATE TABLE t (id INT PRIMARY KEY)",
    ],
    "shell": ["ls -la", "pip install numpy", "cat a.txt | grep x", "export A=1\necho $A"],
    "typescript": ["interface A { x: string }\nconst f = (a: number): string => 'x'"],
}


@pytest.mark.parametrize(("name", "code"), [(name, code) for name, codes in CODE.items() for code in codes])
def test_the_language_is_found_by_the_code(name, code):
    found = detect(code)
    assert found.name == name
    assert 0 < found.confidence <= 0.9
    assert found.source in (Source.PARSED, Source.HEURISTIC)


def test_text_has_no_language():
    found = detect("hello how are you today")
    assert (found.name, found.source, found.confidence) == (None, Source.UNKNOWN, 0.0)


@pytest.mark.parametrize(
    ("code", "declared", "name", "source", "confidence"),
    [
        ("x = 1", "py", "python", Source.DECLARED, 1.0),
        ("x = = 1 ) (", "Python3", "python", Source.DECLARED, 0.7),
        ("let x", "node", "javascript", Source.DECLARED, 1.0),
        ("x <- c(1)", "R", "r", Source.DECLARED, 1.0),
        ("x = 1", "text", "python", Source.PARSED, 0.4),
        ("```js\nlet a = 1\n```", None, "javascript", Source.FENCE, 0.95),
        ("```sql\nx = = 1\n```", None, "sql", Source.FENCE, 0.65),
        ("%%bash\nls", None, "shell", Source.FENCE, 0.95),
        ("%%bash\nls", "python", "shell", Source.FENCE, 0.95),
        ("#!/usr/bin/env python3\nx = 1", None, "python", Source.FENCE, 0.95),
        ("```python\nx = 1\n```", "python", "python", Source.DECLARED, 1.0),
    ],
)
def test_what_is_declared_comes_before_what_is_guessed(code, declared, name, source, confidence):
    found = detect(code, declared)
    assert (found.name, found.source, found.confidence) == (name, source, confidence)


def test_the_fence_is_removed():
    assert detect("```python\nx = 1\n\ny = 2\n```\n").code == "x = 1\n\ny = 2"


def test_functions_of_the_standard_library_are_python():
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    blocks = []
    for path in sorted(root.glob("[a-m]*.py")):
        blocks += [f"def {block}" for block in path.read_text(encoding="utf-8").split("\ndef ")[1:]]
    chosen = random.Random(0).sample(blocks, 150)
    assert sum(detect(code).name == "python" for code in chosen) >= 149


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        (" ~~~py\n  x = 1\n\n~~~\n", "  x = 1\n"),
        ("````python\nx = 1\n# ```\n````", "x = 1\n# ```"),
    ],
)
def test_a_fence_is_removed(text, code):
    found = detect(text)
    assert (found.name, found.source, found.code) == ("python", Source.FENCE, code)


@pytest.mark.parametrize("text", ["```python\nx = 1", "x\n```"])
def test_half_a_fence_is_none(text):
    assert detect(text).code == text


@pytest.mark.parametrize(
    "text", ["```python\n" + " " * 60_000, '\\"' * 30_000, "def f(" + ")" * 30_000], ids=["fence", "string", "def"]
)
def test_hostile_code_takes_no_longer(text):
    begin = time.process_time()
    detect(text)
    assert time.process_time() - begin < 3  # some 0.1 s; with quadratic patterns a minute
