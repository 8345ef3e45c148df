"""The jobs' database: what is written down stays, whatever happens to the process or to the file."""

import dataclasses
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import threading

import pytest

from capibara.core.types import TryAgain, UserError
from capibara.jobs import spec_file
from capibara.jobs.backends.gke import Gke
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
    other.wait(10)
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
    writer.wait(10)
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
