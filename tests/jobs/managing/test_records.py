"""The jobs' database: what is written down stays, whatever happens to the process or to the file."""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from capibara.cli.launching import watching
from capibara.core.types import TryAgain, UserError
from capibara.jobs.backends.gke import Gke
from capibara.jobs.managing import spec_file
from capibara.jobs.managing.records import Record, Records, State, default_path
from capibara.jobs.spec import Attempt

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from job_specs import job  # noqa: E402

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
GKE = Gke(namespace="ml")


def record(name="run", launch="ab", **fields):
    text = spec_file.text_of(GKE, job(name=name, **fields.pop("spec", {})))
    return Record(name=name, text=text, attempt=Attempt(launch=launch), **fields)


@pytest.fixture
def records(tmp_path):
    opened = Records(tmp_path / "state" / "jobs.sqlite")
    yield opened
    opened.close()


def test_a_record_comes_back_as_it_was_written(records):
    written = record(
        state=State.ENDING,
        outcome=State.FAILED,
        reason="why",
        launched_s=1.5,
        submit_s=2.25,
        due_s=3.0,
        running_s=4.0,
        gone_s=5.0,
        pauses=6,
    )
    written = dataclasses.replace(written, attempt=Attempt(launch="cd", number=1, failures=2, spent_s=3))
    records.put(written)
    assert records.find("run") == written and records.all() == [written] and records.find("other") is None
    backend, spec = written.spec()
    assert backend == GKE and spec.attempt == written.attempt and spec.digest == spec_file.digest_of(written.text)


def test_the_same_launch_twice_is_one_job(records):
    first = records.add(record())
    assert records.add(record(launch="cd")) == first
    with pytest.raises(UserError, match="job run is submitting with other files or flags: choose another --name"):
        records.add(record(launch="cd", spec={"restarts": 3}))
    records.cancel("run")
    records.put(dataclasses.replace(first, state=State.CANCELLED))
    assert records.cancelled() == {"run"}
    again = records.add(record(launch="cd"))
    assert again.attempt.launch == "cd" and records.find("run") == again and records.cancelled() == set()


def test_two_that_launch_at_one_moment_get_one_job(records):
    found = []
    others = [Records(records.path) for _ in range(8)]
    threads = [
        threading.Thread(target=lambda n=n, one=one: found.append(one.add(record(launch=str(n)))))
        for n, one in enumerate(others)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in others:
        one.close()
    assert len({one.attempt.launch for one in found}) == 1 and len(found) == 8


def test_one_process_manages_a_job(records):
    script = (
        "import sys, pathlib, time\nfrom capibara.jobs.managing.records import Records\n"
        "with Records(pathlib.Path(sys.argv[1])).lock('run') as has_it:\n"
        "    print(has_it, flush=True)\n    time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, records.path], stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
    )
    assert other.stdout.readline() == "True\n"
    with records.lock("run") as has_it, records.lock("another") as has_another:
        assert not has_it and has_another
    other.send_signal(signal.SIGKILL)
    other.wait(300)
    with records.lock("run") as has_it:
        assert has_it


def test_what_a_killed_process_has_written_is_there(records):
    """SIGKILL in the middle of many writes: all that were finished are there, in their order."""
    script = (
        "import sys, pathlib, dataclasses\nfrom capibara.jobs.managing.records import Records\n"
        "records = Records(pathlib.Path(sys.argv[1]))\nrecord = records.find('run')\n"
        "for n in range(1, 100_000):\n"
        "    records.put(dataclasses.replace(record, pauses=n))\n"
        "    print(n, flush=True)"
    )
    records.put(record())
    writer = subprocess.Popen(
        [sys.executable, "-c", script, records.path], stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
    )
    last = 0
    while last < 50:
        last = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    last = int(([str(last), *writer.stdout.read().split()])[-1])
    writer.wait(300)
    found = Records(records.path).find("run")
    assert last <= found.pauses <= last + 1


@pytest.mark.parametrize("damage", ["half", "zeros", "text"])
def test_a_database_that_cannot_be_read_is_quarantined(tmp_path, damage):
    path, lines = tmp_path / "jobs.sqlite", []
    opened = Records(path)
    for n in range(200):
        opened.put(record(f"run-{n}"))
    opened.close()
    content = path.read_bytes()
    bad = {"half": content[: len(content) // 2], "zeros": b"\0" * len(content), "text": b"no database\n" * 100}
    path.write_bytes(bad[damage])
    opened = Records(path, lines.append)
    assert opened.all() == []
    opened.put(record())
    opened.close()
    (aside,) = tmp_path.glob("jobs.sqlite.corrupted-*")
    assert aside.read_bytes() == bad[damage] and "capibara launch recover" in lines[0] and aside.name in lines[0]


def test_a_database_of_a_later_version_is_left_alone(records):
    records._database.execute("PRAGMA user_version = 9")
    with pytest.raises(UserError, match="of a later version of capibara"):
        Records(records.path)
    assert records.path.exists()


def test_a_file_of_another_program_is_left_alone(tmp_path):
    """A mistyped --state."""
    gin, foreign = tmp_path / "run.gin", tmp_path / "other.sqlite"
    gin.write_text("TRAIN_STEPS = 1\n")
    for path in (gin, foreign):  # of another program, too
        path.with_name(f"{path.name}.lock").write_text("")
    with sqlite3.connect(foreign) as other:
        other.execute("CREATE TABLE jobs (name TEXT)")
    other.close()
    for path in (gin, foreign):
        content = path.read_bytes()
        for _ in range(2):
            with pytest.raises(UserError, match="is no database of jobs: name another --state"):
                Records(path)
        assert path.read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == ["other.sqlite", "other.sqlite.lock", "run.gin", "run.gin.lock"]


def test_a_database_that_was_moved_is_ours_still(records, tmp_path):
    records.put(record())
    moved = Records(records.path.rename(tmp_path / "moved.sqlite"))
    assert moved.find("run") == record()
    moved.close()


def test_a_link_is_no_second_database(records, tmp_path):
    link = tmp_path / "link.sqlite"
    link.symlink_to(records.path)
    other = Records(link)
    with records.lock("run") as has_it, other.lock("run") as has_it_too:
        assert has_it and not has_it_too
    other.close()


def test_a_job_that_is_being_ended_is_not_launched_again(records):
    first = records.add(record())
    records.cancel("run")
    with pytest.raises(UserError, match="job run is being ended: launch it again when it has ended"):
        records.add(record(launch="cd"))
    records.put(dataclasses.replace(first, state=State.ENDING))
    with pytest.raises(UserError, match="is being ended"):
        records.add(record(launch="cd"))


def test_a_full_disk_is_an_error_that_passes(records):
    records.put(record())
    (pages,) = records._database.execute("PRAGMA page_count").fetchone()
    records._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(TryAgain, match="cannot be read or written: database or disk is full"):
        for n in range(200):
            records.put(record(f"run-{n}"))
    records._database.execute("PRAGMA max_page_count = 100000")
    records.put(record("last"))
    assert records.find("last") is not None


def test_nobody_else_reads_it(records):
    with records.lock("run"):
        for path in records.path.parent.rglob("*"):
            assert path.stat().st_mode & 0o077 == 0, path
    assert records.path.stat().st_mode & 0o077 == 0
    assert records.path.parent.stat().st_mode & 0o077 == 0


def test_its_history(records):
    records.note("run", "launched")
    records.note("run", "waiting")
    records.note("other", "launched")
    assert [text for _, text in records.history("run")] == ["launched", "waiting"]


def test_where_it_lies(monkeypatch):
    monkeypatch.setenv("CAPIBARA_STATE", "/a/b")
    assert default_path() == pathlib.Path("/a/b")
    monkeypatch.delenv("CAPIBARA_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert default_path() == pathlib.Path("/s/capibara/jobs.sqlite")


@pytest.mark.parametrize("path", ["/", "/tmp", "x" * 300])
def test_names_of_no_file(path):
    with pytest.raises(UserError, match="name another --state|name a file by --state"):
        Records(pathlib.Path(path))


def test_a_name_that_is_no_text(records):
    assert records.find("\udcff") is None


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="name another --state"):
        Records(tmp_path / "file" / "state" / "jobs.sqlite")
    assert os.listdir(tmp_path) == ["file"]


BAD = {
    "name": [b"run", 5, "", "../../x", "a\ud800"],
    "text": [5, b"\xff\xfe"],
    "launch": [5.5, b"\xff"],
    "number": ["many", 1.5, -1],
    "failures": ["x"],
    "spent_s": ["x", float("inf")],
    "state": ["gone", "", b"\xff"],
    "reason": [b"\xff", 5],
    "outcome": ["gone", ""],
    "launched_s": ["x", -1.0, 1e300, float("inf"), b"\xff"],
    "running_s": ["x"],
    "pauses": [b"", 1.5],
}


@pytest.mark.parametrize("column", BAD)
def test_a_row_that_is_no_record_costs_that_row(tmp_path, column):
    for value in BAD[column]:
        path, lines = tmp_path / f"{len(os.listdir(tmp_path))}.sqlite", []
        with contextlib.closing(Records(path)) as opened:
            for name in ("a", "b", "c"):
                opened.put(record(name))
                opened.note(name, "launched")
        encoded = (
            value.encode("utf-8", "surrogateescape" if value != "a\ud800" else "surrogatepass")
            if isinstance(value, str)
            else value
        )
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.execute("PRAGMA ignore_check_constraints = 1")
            cast = "CAST(? AS TEXT)" if isinstance(value, str) else "?"
            database.execute(f"UPDATE jobs SET {column} = {cast} WHERE name = 'b'", (encoded,))
            (kind,) = database.execute(
                f"SELECT typeof({column}) FROM jobs WHERE launch != 'none' LIMIT 1 OFFSET 1"
            ).fetchone()
        with contextlib.closing(Records(path, lines.append)) as opened:
            names = [one.name for one in opened.all()]
            if kind == "text" and isinstance(value, (int, float)):
                continue  # SQLite has made a text of it: no fault
            assert names == ["a", "c"], (column, value, names)
            assert [one.name for one in opened.all()] == ["a", "c"]  # and says so once
            assert (
                len(lines) == 1 and "its row in" in lines[0] and "launch recover" in lines[0] and "\n" not in lines[0]
            )
            if column != "name":
                with pytest.raises(UserError, match="job 'b' is left out"):
                    opened.check(record("b"))  # its resources may run: it is not launched once more
            opened.put(record("d"))
            assert [one.name for one in opened.all()] == ["a", "c", "d"] and opened.quarantined() == []


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"backend": 5}', "[" * 10_000, '{"name": "b", "slice": {}}', "\x00"]
)
def test_a_job_of_another_text_is_shown(records, text):
    """A job's file may be of another version, or be no file of a job: its row is shown, and others are managed."""
    records.put(dataclasses.replace(record("b"), text=text))
    records.put(record("a"))
    lines = watching.table(records.all(), 100.0).splitlines()
    assert len(lines) == 3 and [watching.as_json(one, 100.0)["name"] for one in records.all()] == ["a", "b"]


def test_a_quarantined_file_is_named_until_its_jobs_are_found(tmp_path):
    path, lines = tmp_path / "jobs.sqlite", []
    with contextlib.closing(Records(path)) as opened:
        opened.put(record())
    path.write_bytes(b"no database\n" * 100)
    for _ in range(3):  # whoever opens it
        lines.clear()
        Records(path, lines.append).close()
        assert "quarantined" in lines[-1] and "corrupted-" in lines[-1] and "capibara launch recover" in lines[-1]
    with contextlib.closing(Records(path)) as opened:
        (renamed,) = opened.recovered()
    assert renamed.read_bytes().startswith(b"no database")
    lines.clear()
    Records(path, lines.append).close()
    assert lines == []


def test_a_locked_file_is_told_within_two_seconds(tmp_path):
    path, lines = tmp_path / "jobs.sqlite", []
    with contextlib.closing(Records(path, lines.append)) as opened, contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        begun_s = time.monotonic()
        with pytest.raises(TryAgain, match="locked by another process"):
            Records(path)
        assert time.monotonic() - begun_s < 2.0
        writing = threading.Thread(target=opened.put, args=(record(),))  # which waits longer, and says so
        writing.start()
        while not lines and time.monotonic() - begun_s < 10.0:
            time.sleep(0.01)
        assert time.monotonic() - begun_s < 4.0 and "in use by another process: waiting, at most 30 s" in lines[0]
        other.rollback()
        writing.join(20.0)
        assert opened.find("run") is not None


def test_a_file_that_another_process_opens_is_told_within_two_seconds(tmp_path):
    path = tmp_path / "jobs.sqlite"
    Records(path).close()
    with open(f"{path}.lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begun_s = time.monotonic()
        with pytest.raises(TryAgain, match="is locked by process [0-9]+"):
            Records(path)
        assert time.monotonic() - begun_s < 2.0
