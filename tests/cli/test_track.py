"""`capibara track` sends a run folder to trackers afterwards, and does not take addresses from a foreign one."""

import json
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

from capibara.cli import track
from capibara.core.types import TryAgain, UserError
from tests.monitoring.trackers.runs import lived

BINDINGS = "Trainer.steps = 4\nMonitoring.trackers = (@JsonlTracker(), @PrintTracker())\nPrintTracker.every = 2\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lived(tmp_path / "run", [1, 2])
    return tmp_path / "run"


def record(folder, text):
    """Replaces the configuration of a run, as its own start would."""
    from capibara.checkpoints import run_manifest

    run_manifest.replace(run_manifest.folder_of(folder), {"config.gin": text.encode()})


def test_a_tracker_that_is_named(folder, capsys):
    record(folder, BINDINGS)
    path = folder.parent / "all.jsonl"
    arguments = [str(folder), "--to=print", "--to=JsonlTracker", f"--gin.JsonlTracker.path={path}"]
    assert track.main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == ["step 2 train/loss=3", "sent to print, jsonl"]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines() if "metrics" in line] == [1, 2]
    assert track.main(arguments) == 0  # nothing is new
    assert capsys.readouterr().out.splitlines() == ["sent to print, jsonl"]
    assert len([line for line in path.read_text().splitlines() if "metrics" in line]) == 2


def test_the_run_s_own_trackers_but_not_its_addresses(folder, capsys):
    path = folder.parent / "theirs.jsonl"
    record(folder, BINDINGS + f"JsonlTracker.path = {str(path)!r}\n")
    with pytest.raises(UserError, match=rf"JsonlTracker.path = '{path}'.* give --gin.JsonlTracker.path=") as error:
        track.main([str(folder)])
    assert "\n" not in str(error.value) and not path.exists()
    assert track.main([str(folder), "--trust_config"]) == 0 and path.exists()
    shutil.rmtree(folder / "trackers")
    assert track.main([str(folder), f"--gin.JsonlTracker.path={path}"]) == 0
    shutil.rmtree(folder / "trackers")
    (folder.parent / "mine.gin").write_text(f"JsonlTracker.path = {str(path)!r}\n")
    assert track.main([str(folder), "--gin_file=mine.gin"]) == 0


def test_an_address_of_one_tracker_is_not_one_of_another(folder):
    """The user names an address for a class, and the record another one for a scope of it."""
    mine, theirs = folder.parent / "mine.jsonl", folder.parent / "theirs.jsonl"
    trackers = "Monitoring.trackers = (@JsonlTracker(), @evil/JsonlTracker())\n"
    record(folder, trackers + f"evil/JsonlTracker.path = {str(theirs)!r}\n")
    with pytest.raises(UserError, match=f"JsonlTracker.path = '{theirs}'"):
        track.main([str(folder), f"--gin.JsonlTracker.path={mine}"])
    assert not mine.exists() and not theirs.exists()


ADVICE = "give --gin.JsonlTracker.path=evil.jsonl if you trust it"
THEIRS = """
import dataclasses
from capibara.config import configurable
from capibara.monitoring.trackers.clients import plain

@configurable
@dataclasses.dataclass(kw_only=True)
class JsonlTracker(plain.JsonlTracker):
    more: int = 1

@configurable
def lines(where="mine.jsonl"):
    return plain.JsonlTracker(path=where)

@configurable
def place(where="mine.jsonl"):
    return where
"""


@pytest.mark.parametrize(
    ("recorded", "gin", "why"),
    [
        ("(@plain.JsonlTracker(),)\nplain.JsonlTracker.path = 'evil.jsonl'", "", ADVICE),
        ("(@their_trackers.JsonlTracker(),)\ntheir_trackers.JsonlTracker.path = 'evil.jsonl'", "", ADVICE),
        ("(@lines(),)\nlines.where = 'evil.jsonl'", "plain.JsonlTracker.path = 'mine.jsonl'", ADVICE),
        (
            "(@place(),)\nplace.where = 'evil.jsonl'",
            "Monitoring.trackers = (@plain.JsonlTracker(),)\nplain.JsonlTracker.path = @place()",
            ADVICE,
        ),
        ("(@plain.JsonlTracker(),)\nWHERE = 'evil.jsonl'", "plain.JsonlTracker.path = %WHERE", "WHERE"),
    ],
    ids=["same name", "their own", "function", "reference", "macro"],
)
def test_no_address_of_a_foreign_record_is_used(folder, recorded, gin, why):
    (folder.parent / "their_trackers.py").write_text(THEIRS)
    (folder.parent / "theirs.gin").write_text(f"import their_trackers\n{gin}\n")
    record(folder, f"Monitoring.trackers = {recorded}\n")
    command = [sys.executable, "-m", "capibara.track", str(folder), "--gin_file=theirs.gin"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)  # their classes stay in Gin's registry
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and why in done.stderr, done.stderr
    assert not list(folder.parent.rglob("evil.jsonl"))


def test_a_tracker_of_the_users_module(folder, capsys):
    (folder.parent / "their_tracker.py").write_text(
        textwrap.dedent("""
        import dataclasses
        from capibara.config import configurable
        from capibara.monitoring.trackers.tracker import Tracker

        @configurable
        @dataclasses.dataclass(kw_only=True)
        class Theirs(Tracker):
            def start(self, run):
                run.say(f"{run.name} begins")
        """)
    )
    with pytest.raises(UserError, match="no configurable named @Theirs"):
        track.main([str(folder), "--to=Theirs"])
    (folder.parent / "theirs.gin").write_text("import their_tracker\n")
    assert track.main([str(folder), "--to=Theirs", "--gin_file=theirs.gin"]) == 0
    assert capsys.readouterr().out.splitlines() == ["run begins", "sent to theirs"]


def test_one_that_does_not_take_it(folder, capsys):
    (folder.parent / "failing_tracker.py").write_text(
        pathlib.Path(__file__).parents[1].joinpath("monitoring/trackers/runs.py").read_text()
    )
    (folder.parent / "failing.gin").write_text("import failing_tracker\n")
    arguments = [str(folder), "--to=failing_tracker.Odd", "--gin_file=failing.gin", "--timeout=20"]
    with pytest.raises(UserError, match="--to=failing_tracker.Odd is no tracker"):
        track.main(arguments)
    with pytest.raises(TryAgain, match=r"failing has not got 4 lines of .*run: run this again"):
        (folder.parent / "failing_tracker.py").write_text(FAILING)
        track.main([str(folder), "--to=Failing", "--gin_file=failing.gin"])
    assert capsys.readouterr().out.splitlines() == ["failing fails: ConnectionError: no server"]


FAILING = """
import dataclasses
from capibara.config import configurable
from capibara.monitoring.trackers.tracker import Tracker

@configurable
@dataclasses.dataclass(kw_only=True)
class Failing(Tracker):
    def start(self, run):
        raise ConnectionError("no server")
"""


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "track needs a run folder"),
        (["nowhere", "--to=print"], "nowhere is not a run folder with metrics: it has no config.gin"),
        (["run"], r"has no trackers \(Monitoring.trackers is empty\): name one, e.g. --to=wandb"),
        (["run", "--to=wandd"], "no configurable named @wandd"),
        (["run", "--to=a b"], "--to=a b is no tracker.*: name one of wandb, comet, mlflow, print"),
        (["run", "--to=print", "--timeout=0"], "--timeout=0 must be above 0"),
        (["run", "--to=print", "--timeout=inf"], "--timeout=inf must be above 0 and at most"),
        (["run", "--to=print", "--timeout=nan"], "--timeout=nan must be above 0"),
    ],
)
def test_mistakes_are_one_line(folder, arguments, match):
    record(folder, "Trainer.steps = 4\n")
    with pytest.raises(UserError, match=match) as error:
        track.main(arguments)
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_written_is_one_line(folder):
    record(folder, "Trainer.steps = 4\n")
    (folder / "trackers").write_text("a file")
    with pytest.raises(UserError, match="trackers cannot be made .*: trackers need a run folder that you may write"):
        track.main([str(folder), "--to=print"])


def test_a_configuration_that_was_changed_is_refused(folder):
    (folder / "config.gin").write_text("Trainer.steps = 5\n")
    with pytest.raises(UserError, match="config.gin"):
        track.main([str(folder), "--to=print"])


def test_a_file_of_the_users_folders_is_found(folder):
    """In both readings of the configuration: with the record, and without."""
    (folder.parent / "files").mkdir()
    (folder.parent / "files" / "mine.gin").write_text(f"JsonlTracker.path = {str(folder.parent / 'all.jsonl')!r}\n")
    record(folder, "Trainer.steps = 4\n")
    arguments = [
        str(folder),
        "--to=JsonlTracker",
        "--gin_file=mine.gin",
        f"--gin_search_paths={folder.parent / 'files'}",
    ]
    assert track.main(arguments) == 0 and (folder.parent / "all.jsonl").exists()


def test_a_tracker_that_is_named_gets_no_address_of_the_record(folder):
    theirs = folder.parent / "theirs.jsonl"
    record(folder, f"JsonlTracker.path = {str(theirs)!r}\n")
    with pytest.raises(UserError, match=f"config.gin has JsonlTracker.path = '{theirs}'"):
        track.main([str(folder), "--to=JsonlTracker"])
    assert not theirs.exists()


@pytest.mark.parametrize("name", ["plain.JsonlTracker", "evil/JsonlTracker", "a/b/plain.JsonlTracker"])
def test_the_advice_for_an_address_works(folder, name):
    path = folder.parent / "theirs.jsonl"
    record(folder, f"Monitoring.trackers = (@{name}(),)\n{name}.path = {str(path)!r}\n")
    with pytest.raises(UserError, match=f"give --gin.JsonlTracker.path={path}"):
        track.main([str(folder)])
    assert track.main([str(folder), f"--gin.JsonlTracker.path={path}"]) == 0 and path.exists()


def test_an_address_that_the_user_names_by_a_macro(folder):
    record(folder, "Monitoring.trackers = (@JsonlTracker(),)\nJsonlTracker.path = 'x.jsonl'\n")
    (folder.parent / "mine.gin").write_text("WHERE = 'x.jsonl'\nJsonlTracker.path = %WHERE\n")
    assert track.main([str(folder), "--gin_file=mine.gin"]) == 0 and (folder.parent / "x.jsonl").exists()
