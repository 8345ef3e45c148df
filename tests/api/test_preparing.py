"""Data sets from Python are those of `capibara prepare`, and paths of files are never looked for on the Hub."""

from __future__ import annotations

import json
import pathlib

import pytest

import capibara as cb
from capibara.cli import prepare
from capibara.interop import hub
from capibara.multihost import exits

PLAYBOOK = "## STRATEGIES\n[str-1] helpful=5 harmful=0 :: In Python close files with a with statement.\n"


@pytest.fixture
def there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("ann.md").write_text(PLAYBOOK)
    cells = {"python": "rows = [1, {0}]\nprint(sum(rows))", "sql": "SELECT name FROM users_{0} WHERE age > {0}"}
    lines = [
        {"code": code.format(i), "language": language, "session": f"{language}{i}", "stdout": "7", "exit_code": 0}
        for i in range(40)
        for language, code in cells.items()
    ]
    pathlib.Path("log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def files(folder: str) -> dict[str, bytes]:
    """The data of a set; its records of the build have times."""
    paths = [path for path in pathlib.Path(folder).rglob("*.jsonl") if path.name != "lineage.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_set_of_python_is_that_of_the_command_line(there, capfd):
    cases = {
        "playbooks": (
            "ann.md",
            lambda out: cb.prepare_playbooks("ann.md", out, ranking=cb.BulletRanking(per_domain=7)),
        ),
        "executions": ("log.jsonl", lambda out: cb.prepare_executions(["log.jsonl"], out)),
        "routing": (
            "data/executions",
            lambda out: cb.prepare_routing("data/executions", out, cb.RoutingSet(domains=("python", "sql"))),
        ),
    }
    flags = {
        "playbooks": ["--gin.BulletRanking.per_domain=7"],
        "routing": ["--gin.RoutingSet.domains=('python', 'sql')"],
    }
    for word, (source, prepared) in cases.items():
        manifest = prepared(f"data/{word}")
        argv = [word, source, f"--out=cli/{word}", "--num_workers=0", *flags.get(word, [])]
        assert exits.run_verb(prepare.main, argv) == 0, capfd.readouterr().err
        assert files(f"data/{word}") == files(f"cli/{word}") and len(files(f"data/{word}")) >= 2
        assert manifest["counts"]["skipped"] == 0
        assert manifest == json.loads(pathlib.Path(f"data/{word}/manifest.json").read_text())


def test_what_is_skipped_is_in_the_manifest(there):
    pathlib.Path("bad.jsonl").write_text("{\n")
    manifest = cb.prepare_executions(["log.jsonl", "bad.jsonl"], "data/some")
    assert manifest["counts"]["skipped"] == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cb.prepare_executions(5, "out"), "inputs is 5, must be a file, folder, glob or address"),
        (lambda: cb.prepare_executions("log.jsonl", ""), "out is '', must be a path: try 'data/set'"),
        (lambda: cb.prepare_playbooks("none/*.md", "out"), "none/*.md"),
        (lambda: cb.dashboard(()), r"runs is (), must be a folder, or a list of them: try 'runs'"),
        (lambda: cb.dashboard("runs", port=70000), "port is 70000, must be from 0 to 65535"),
    ],
)
def test_mistakes_are_one_line(there, call, message):
    with pytest.raises(cb.UserError) as caught:
        call()
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: cb.index("data/none"),
        lambda model: cb.rewire(model, "out", cb.PruneExperts(experts=1), statistics="data/none"),
        lambda model: cb.prepare_rope(model, "data/none.jsonl", "data/longer", 256),
        lambda model: cb.prepare_index("none/*.md", "data/index", model),
        lambda model: cb.prepare_executions("none/*.jsonl", "data/none"),
    ],
)
def test_the_path_of_a_file_is_not_asked_for_on_the_hub(folder, there, call, monkeypatch):
    asked = []
    local_path = hub.local_path
    monkeypatch.setattr(hub, "local_path", lambda path: asked.append(path) or local_path(path))
    with pytest.raises(cb.UserError) as caught:
        call(f"{folder}/hf")
    assert "Hub" not in str(caught.value) and {*asked} <= {f"{folder}/hf"}
