"""Trackers, fed with what a run has written: in order, from where they were, and after failures."""

import dataclasses
import json
import shutil
import threading
import time

import pytest

from capibara.core.types import UserError
from capibara.monitoring.trackers import feed, feeds, state
from capibara.monitoring.trackers.clients.plain import JsonlTracker, PrintTracker
from capibara.monitoring.trackers.feeds import Feeds
from capibara.monitoring.trackers.tracker import Refused
from tests.monitoring.trackers.runs import PNG, TOKEN, Noting, lived, sent


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "my run"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(feed, "LOCAL_POLL_S", 0.01)
    monkeypatch.setattr(feed, "RETRY_S", 0.01)


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
    (folder / "loss_curve.png").write_bytes(PNG % b"picture")
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
    assert by_kind(tracker, "picture") == [(1, "loss_curve.png", len(PNG % b"picture"))]
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


def test_what_is_refused_for_good_is_skipped(folder):
    lived(folder, [*range(1, 8)])

    class Refusing(Noting):
        def log(self, moment, metrics):
            if moment.step in (3, 5):
                raise Refused(f"too odd\n {TOKEN}")
            super().log(moment, metrics)

    tracker = Refusing()
    said, unsent = sent([tracker], folder)
    assert not unsent and [step for step, _ in tracker.losses()] == [1, 2, 4, 6, 7]
    assert said == [f"refusing does not take metrics of step {step}: too odd [hidden]; skipped" for step in (3, 5)]


def test_a_tracker_that_refuses_everything_fails(folder):
    lived(folder, [*range(1, 40)])

    class Refusing(Noting):
        def log(self, moment, metrics):
            raise Refused("no")

    said, unsent = sent([Refusing()], folder)
    assert unsent["refusing"] >= 39 and len(said) == 6 and said[-1] == "refusing fails: Refused: no"


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
    monkeypatch.setattr(feeds, "STALLED_S", 0.05)
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
    (folder / "a.png").write_bytes(PNG % b"12345")
    tracker = Noting()
    sent([tracker], folder)
    lived(folder, [2], start=1)
    (folder / "b.png").write_bytes(PNG % b"123")
    sent([tracker], folder)
    assert by_kind(tracker, "picture") == [(1, "a.png", 21), (2, "a.png", 21), (2, "b.png", 19)]


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


def test_no_line_holds_up_those_that_follow_it(folder):
    metrics = lived(folder, [1], reason=None)
    deep = '{"a": ' * 500 + "1" + "}" * 500
    odd = [
        '{"kind": "train", "step": 2, "time": 1.0, "loss": 1' + "0" * 400 + ', "\\udc80": 3.0, "grad_norm": 1e308}',
        '{"kind": "train", "step": 1' + "0" * 30 + ', "time": 1.0, "loss": 1.0}',
        '{"kind": "train", "step": 3, "time": NaN, "loss": 1.0}',
        '{"kind": "train", "step": 4, "time": 1.0, "deep": ' + deep + ', "many": [' + "1," * 50_000 + "1]}",
        '{"kind": "sample", "step": 4, "time": 1.0, "prompt": "\\ud800", "text": "\\udc80\\u001b"}',
        '{"kind": "event", "step": 4, "event": "facts", "facts": {"\\ud800": "\\ud800", "deep": ' + deep + "}}",
        "\x00" * 1000,
        "x" * 3_000_000,
    ]
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(f"{line}\n" for line in odd)
    metrics.on_step(5, {"loss": 5.0})
    metrics.on_train_end(5, "finished")
    tracker = Noting()
    assert sent([tracker], folder) == ([], {})
    assert tracker.losses()[-1] == (5, 5.0) and tracker.calls[-1] == ("finish", "finished")
    logged = by_kind(tracker, "log")
    assert {"train/\\udc80": 3.0, "train/grad_norm": 1e308} in [found for _, found in logged]
    assert max(len(found) for _, found in logged) <= 10_000
    json.dumps(tracker.calls, ensure_ascii=False).encode()  # every text can be sent


def test_manifests_that_make_no_sense_hold_up_no_metrics(folder, monkeypatch):
    def fails(path):
        raise KeyError("about")

    monkeypatch.setattr(feed.lineage, "of_run", fails)
    lived(folder, [1])
    tracker = Noting()
    assert sent([tracker], folder) == ([], {}) and tracker.losses() == [(1, 2.0)]


def test_a_full_disk_ends_no_feed(folder, monkeypatch):
    tries = []

    def full(model_dir, label, found):
        tries.append(found)
        if len(tries) < 4:
            raise OSError(28, "No space left on device")
        write(model_dir, label, found)

    def no_log(*args, **options):
        raise OSError(28, "No space left on device")

    write = state.write
    monkeypatch.setattr(state, "write", full)
    monkeypatch.setattr(feeds, "open", no_log, raising=False)
    lived(folder, [1, 2])
    said, tracker = [], Noting()
    feeding = Feeds([tracker], str(folder), said.append)
    feeding.start()
    limit_s = time.monotonic() + 10
    while len(tries) < 4 and time.monotonic() < limit_s:
        time.sleep(0.01)
    feeding.end()
    assert feeding.wait(10) and feeding.unsent() == {}
    assert [line for line in said if "fails" in line] == ["noting fails: OSError: [Errno 28] No space left on device"]


def test_a_client_that_ends_the_program_ends_only_its_session(folder):
    @dataclasses.dataclass(kw_only=True)
    class Leaving(Noting):
        def start(self, run):
            raise SystemExit("no key")

    lived(folder, [1])
    said, unsent = sent([Leaving(), other := Noting()], folder)
    assert said == ["leaving fails: SystemExit: no key"] and unsent == {"leaving": 3}
    assert other.losses() == [(1, 2.0)]


def test_labels_are_parts_of_file_names_and_never_the_runs_own():
    class Named(Noting):
        def __init__(self, label):
            self.own = label

        @property
        def label(self):
            return self.own

    names = ["run", "../../etc/x", "a", "a-2", "a", "", "x" * 300]
    found = feeds.labels([Named(name) for name in names])
    assert found[:2] == ["run-2", "-..-etc-x"] and found[2:6] == ["a", "a-2", "a-3", "tracker"]
    assert len({*found}) == len(names) and all("/" not in one and len(one) < 80 for one in found)


def test_an_id_that_the_state_cannot_hold_is_refused(folder):
    @dataclasses.dataclass(kw_only=True)
    class Odd(Noting):
        def start(self, run):
            return "team/project/run"

    lived(folder, [1])
    said, _ = sent([Odd()], folder)
    assert len(said) == 1 and "'team/project/run', must be None or at most 128 letters" in said[0]


def test_links_and_torn_pictures_are_not_sent(folder, tmp_path):
    lived(folder, [1])
    secret = tmp_path / "secret"
    secret.write_bytes(PNG % b"secret")
    (folder / "link.png").symlink_to(secret)
    (folder / "plan.json").symlink_to(secret)
    (folder / "torn.png").write_bytes((PNG % b"x")[:-4])
    (folder / "fake.png").write_bytes(b"root:x:0:0")
    (folder / "good.png").write_bytes(PNG % b"x")
    tracker = Noting()
    assert sent([tracker], folder) == ([], {})
    assert [name for _, name, _ in by_kind(tracker, "picture")] == ["good.png"]
    assert "plan.json" not in {name for _, name, _ in by_kind(tracker, "text")}


def test_names_cannot_drive_the_terminal(folder):
    metrics = lived(folder, [], reason=None)
    metrics.on_step(1, {"\x1b[2Jloss\u202e": 1.0})
    metrics.on_train_end(1, "finished")
    said, _ = sent([PrintTracker()], folder)
    assert said == ["step 1 train/\\x1b[2Jloss\\u202e=1"]


def test_no_text_of_a_run_is_sent_with_its_secrets(folder):
    metrics = lived(folder, [1], reason=None)
    metrics.on_sample(1, f"my key is {TOKEN} ", "and")
    metrics.on_system(1, {"cpus": 2, "warning": f"full: {TOKEN}"})
    metrics.on_train_end(1, "finished")
    (folder / "plan.json").write_text(json.dumps({"command": f"--token={TOKEN}"}))
    tracker = Noting()
    assert sent([tracker], folder) == ([], {})
    texts = {name: text for _, name, text in by_kind(tracker, "text")}
    assert texts["sample/my key is [hidden] "] == "my key is [hidden] and" and texts["warning"] == "full: [hidden]"
    assert "[hidden]" in texts["plan.json"] and TOKEN not in json.dumps(tracker.calls)


def test_the_log_of_faults_has_a_limit(folder, monkeypatch):
    monkeypatch.setattr(feeds, "_MOST_LOG_BYTES", 1_000)
    lived(folder, [1])
    feeding = Feeds([Noting()], str(folder), print)
    for number in range(50):
        feeding._note(OSError(f"fault {number} {'x' * 100}"))
    text = (folder / "trackers" / "trackers.log").read_text()
    assert len(text) < 1_200 and "fault 48" in text and "fault 49" in text


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ({}, ("id", 40, 2)),
        ({"run_id": "../../etc x"}, (None, 40, 2)),
        ({"run_id": "x" * 129}, (None, 40, 2)),
        ({"run_id": 7}, (None, 40, 2)),
        ({"position": "40"}, ("id", 0, 0)),
        ({"position": -1}, ("id", 0, 0)),
        ({"line": 41}, ("id", 0, 0)),
        ({"line": True}, ("id", 0, 0)),
    ],
)
def test_of_a_state_that_makes_no_sense_only_the_rest_is_used(folder, odd, expected):
    (folder / "trackers").mkdir(parents=True)
    (folder / "trackers" / "noting.json").write_text(json.dumps({"run_id": "id", "position": 40, "line": 2} | odd))
    found = state.read(str(folder), "noting")
    assert (found.run_id, found.position.byte, found.position.line) == expected


def test_many_refusals_that_are_not_in_a_row_are_skipped(folder):
    lived(folder, [*range(1, 60)])

    class Refusing(Noting):
        def log(self, moment, metrics):
            if moment.step % 2:
                raise Refused("odd")
            super().log(moment, metrics)

    tracker = Refusing()
    said, unsent = sent([tracker], folder)
    assert not unsent and len(said) == 5 and [step for step, _ in tracker.losses()] == [*range(2, 60, 2)]
