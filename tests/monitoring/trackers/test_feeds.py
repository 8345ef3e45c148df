"""Trackers, fed with what a run has written: in order, from where they were, and after failures."""

import json
import shutil
import threading

import pytest

from capibara.core.types import UserError
from capibara.monitoring.trackers import feed, feeds, state
from capibara.monitoring.trackers.clients.plain import JsonlTracker, PrintTracker
from capibara.monitoring.trackers.feeds import Feeds
from tests.monitoring.trackers.runs import TOKEN, Noting, lived, sent


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "my run"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(feed, "_LOCAL_POLL_S", 0.01)
    monkeypatch.setattr(feed, "_RETRY_S", 0.01)


def by_kind(tracker, kind):
    return [call[1:] for call in tracker.calls if call[0] == kind]


def test_everything_a_run_writes_arrives_under_its_name(folder):
    metrics = lived(folder, [1], reason=None)
    metrics.on_facts(
        0, {"git": {"commit": "abc", "remote": "https://me:my-password@host/x"}, "command": [f"--key={TOKEN}"]}
    )
    metrics.on_spent(1, {"save": 2.5})
    metrics.on_evaluate(1, {"loss": 0.5, "perplexity": float("nan")})
    metrics.on_system(1, {"cpus": 2, "device_memory_bytes": None, "devices": {"duty": [1.0, None]}, "warning": "full"})
    metrics.on_sample(1, "def ", f"f(x): return '{TOKEN}'")
    metrics.on_train_end(1, "finished")
    (folder / "loss_curve.png").write_bytes(b"picture")
    tracker = Noting()
    assert sent([tracker], folder) == ([], {})
    assert by_kind(tracker, "log") == [
        (1, {"train/loss": 2.0}),
        (1, {"spent/save_s": 2.5}),
        (1, {"eval/loss": 0.5}),
        (1, {"system/cpus": 2.0, "system/devices/duty/0": 1.0}),
    ]
    texts = {name: text for _, name, text in by_kind(tracker, "text")}
    assert texts["sample/def "] == "def f(x): return '[hidden]'" and texts["warning"] == "full"
    assert "Trainer.steps = 100" in texts["config.gin"]
    run, facts = (call[1] for call in by_kind(tracker, "facts"))
    assert run["run"]["device_count"] == 4
    assert facts == {"git": {"commit": "abc", "remote": "https://[hidden]@host/x"}, "command": ["--key=[hidden]"]}
    assert by_kind(tracker, "picture") == [(1, "loss_curve.png", 7)]
    assert tracker.calls[-1] == ("finish", "finished")
    assert TOKEN not in json.dumps(tracker.calls)


def test_the_configuration_is_there_by_parameter_without_secrets(folder):
    lived(folder, [1])
    seen = []

    class Looking(Noting):
        def start(self, run):
            seen.append(run)

    sent([Looking()], folder)
    (run,) = seen
    assert run.values == {"Trainer.steps": 100, "Trainer.model_dir": "x", "Dataset.token": run.values["Dataset.token"]}
    assert TOKEN not in run.config_text and TOKEN not in str(run.config) and "[hidden]" in run.values["Dataset.token"]
    assert (run.name, run.folder) == ("my run", str(folder))


def test_a_resumed_run_continues_where_the_tracker_is(folder):
    lived(folder, [1, 2, 3], reason="interrupted")
    tracker = Noting()
    sent([tracker], folder)
    first = state.read(str(folder), "noting")
    lived(folder, [3, 4], start=2, loss=10.0)
    sent([tracker], folder)
    again = state.read(str(folder), "noting")
    assert tracker.losses() == [(1, 2.0), (2, 3.0), (3, 4.0), (3, 13.0), (4, 14.0)]
    assert by_kind(tracker, "start") == [(None,), (first.run_id,)] and again.run_id == first.run_id
    assert by_kind(tracker, "roll_back") == [(2,)]
    assert by_kind(tracker, "finish") == [("interrupted",), ("finished",)]
    assert sent([tracker], folder) == ([], {}) and len(by_kind(tracker, "start")) == 2  # nothing is new


def test_steps_that_were_repeated_before_it_came_are_left_out(folder):
    lived(folder, [1, 2, 3], reason=None)
    lived(folder, [2, 3], start=1, loss=10.0)
    tracker = Noting()
    sent([tracker], folder)
    assert tracker.losses() == [(1, 2.0), (2, 12.0), (3, 13.0)]


def test_a_killed_run_ends_as_crashed(folder):
    lived(folder, [1], reason=None)
    tracker = Noting()
    sent([tracker], folder)
    assert tracker.calls[-1] == ("finish", "crashed")


@pytest.mark.parametrize("fails", ["start", "log", "flush", "finish"])
def test_after_failures_nothing_is_missing_and_one_line_says_so(folder, fails):
    lived(folder, [*range(1, 8)])

    class Failing(Noting):
        def __post_init__(self):
            super().__post_init__()
            self.left = [True] * (1 if fails == "finish" else 3)  # at the end it gets one more try

    tracker = Failing(how=fails)

    def failing(self, *args):
        if self.left:
            self.left.pop()
            raise OSError(f"broken {TOKEN}\n at a second line")
        return getattr(Noting, fails)(self, *args)

    setattr(Failing, fails, failing)
    said = []
    feeds = Feeds([tracker], str(folder), said.append)
    feeds.start()
    threading.Timer(0.5, feeds.end).start()
    assert feeds.wait(20.0) and not feeds.unsent()
    assert [loss for loss in dict(tracker.losses()).items()] == [(step, 1.0 + step) for step in range(1, 8)]
    assert said[0] == "failing fails: OSError: broken [hidden] at a second line"
    assert said[1:] in ([], ["failing works again"])
    log = (folder / "trackers" / "trackers.log").read_text()
    assert "Traceback" in log and TOKEN not in log


def test_a_mistake_of_the_user_is_not_tried_again(folder):
    lived(folder, [1])
    tries = []

    class Wrong(Noting):
        def start(self, run):
            tries.append(1)
            raise UserError("wandb is not installed (needed for @WandbTracker): pip install x")

    said, unsent = sent([Wrong()], folder)
    assert said == ["wrong fails: wandb is not installed (needed for @WandbTracker): pip install x"]
    assert len(tries) == 1 and unsent == {"wrong": 3}


def test_one_that_blocks_holds_up_no_other_and_is_named(folder, monkeypatch):
    lived(folder, [1, 2])
    monkeypatch.setattr(feeds, "_STALLED_S", 0.05)
    blocked = threading.Event()

    class Blocking(Noting):
        def log(self, moment, metrics):
            blocked.wait()

    other = Noting()
    said, unsent = sent([Blocking(), other], folder, within_s=0.5)
    assert other.losses() == [(1, 2.0), (2, 3.0)] and unsent == {"blocking": 4}
    said, _ = sent([Blocking()], folder, within_s=0.5)
    blocked.set()
    assert said == ["blocking does not answer; what it misses is sent when it does"]


def test_what_was_not_flushed_is_sent_again(folder):
    """As by W&B, which sends in the background: only its end is certain."""

    class Later(Noting):
        def flush(self):
            super().flush()
            return False

    lived(folder, [1, 2], reason=None)
    tracker = Later()
    found = feed.Feed(
        tracker,
        "later",
        str(folder),
        str(folder),
        feed.Hooks(**dict.fromkeys(("failed", "works", "say", "fault"), lambda said: None)),
    )
    thread = threading.Thread(target=found.run)
    thread.start()
    while len(tracker.losses()) < 2:
        pass
    assert state.read(str(folder), "later").position.byte == 0
    found.ending.set()
    thread.join()
    assert state.read(str(folder), "later").position.line == 3


def test_several_of_a_kind_have_states_of_their_own(folder):
    lived(folder, [1])
    sent([Noting(), Noting(), Noting(how="other")], folder)
    names = sorted(path.name for path in (folder / "trackers").glob("*.json"))
    assert names == ["noting-2.json", "noting-3.json", "noting.json", "run.json"]


def test_a_run_that_is_started_over_is_another_run(folder):
    lived(folder, [1, 2])
    tracker = Noting()
    sent([tracker], folder)
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text()[:-40])
    sent([tracker], folder)  # another file: from its beginning
    assert [step for step, _ in tracker.losses()] == [1, 2, 1, 2]
    before = state.uid(str(folder))
    shutil.rmtree(folder)
    lived(folder, [1])
    assert state.uid(str(folder)) != before


def test_pictures_are_sent_when_they_have_changed(folder, monkeypatch):
    lived(folder, [1])
    (folder / "a.png").write_bytes(b"12345")
    tracker = Noting()
    sent([tracker], folder)
    lived(folder, [2], start=1)
    (folder / "b.png").write_bytes(b"123")
    sent([tracker], folder)
    assert by_kind(tracker, "picture") == [(1, "a.png", 5), (2, "a.png", 5), (2, "b.png", 3)]


def test_lineage_and_plan_are_attached(folder):
    lived(folder, [1])
    (folder / "plan.json").write_text('{"mesh": 8}')
    step = folder / "checkpoints" / "1"
    step.mkdir(parents=True)
    about = {"datasets": [{"path": "data.jsonl", "sha256": "ab" * 32}]}
    (step / "manifest.json").write_text(json.dumps({"step": 1, "about": about, "xxh128": "cd" * 16}))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"steps": [1]}))
    (folder / "lineage.jsonl").write_text('{"eventType": "START"}\n{"eventType": "COMPLETE"}\n')
    tracker = Noting()
    sent([tracker], folder)
    texts = {name: text for _, name, text in by_kind(tracker, "text")}
    found = json.loads(texts["lineage.json"])
    assert found["datasets"] == about["datasets"] and found["event"] == {"eventType": "COMPLETE"}
    assert found["checkpoint"] == {"step": "1", "xxh128": "cd" * 16}
    assert texts["plan.json"] == '{"mesh": 8}'


def test_a_file_of_lines_that_several_runs_share(tmp_path):
    path = tmp_path / "all" / "runs.jsonl"
    for name in ("a", "b"):
        lived(tmp_path / name, [1, 2])
        sent([JsonlTracker(path=str(path))], tmp_path / name)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    logged = [(one["run"], one["step"], one["metrics"]) for one in found if "metrics" in one]
    assert logged == [(name, step, {"train/loss": 1.0 + step}) for name in ("a", "b") for step in (1, 2)]
    assert [one["finished"] for one in found if "finished" in one] == ["finished"] * 2
    assert len({one["uid"] for one in found}) == 2


def test_lines_in_the_output_of_the_run(folder):
    lived(folder, [1, 2, 3, 4])
    said, _ = sent([PrintTracker(every=2)], folder)
    assert said == ["step 2 train/loss=3", "step 4 train/loss=5"]


def test_mistakes_in_the_options_are_one_line():
    for make in (
        lambda: JsonlTracker(path=" "),
        lambda: JsonlTracker(path="gs://bucket/x.jsonl"),
        lambda: PrintTracker(every=0),
    ):
        with pytest.raises(UserError) as error:
            make()
        assert "\n" not in str(error.value) and "Tracker." in str(error.value)


def test_two_processes_do_not_feed_a_run_at_once(folder):
    lived(folder, [1])
    with state.locked(str(folder), within_s=0.0):
        with pytest.raises(UserError, match="feeds the trackers of .*wait until it has ended"):
            with state.locked(str(folder), within_s=0.05):
                pass
