"""Every verb that takes a run folder, given one that somebody has made to show or copy files from elsewhere.

Each file and folder of a run is replaced in turn by a link to its twin outside, whose every text holds a secret, by a pipe, by
a device, by 2 GB of nothing, and by other bytes. No verb ever prints the secret, hangs, or ends in more than a line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time

import jax.numpy as jnp
import pytest
from etils import epath

from capibara.checkpoints import manifest, run_manifest
from capibara.checkpoints.manager import Checkpointing, Checkpoints
from capibara.cli import convert, evaluate, infer, merge, prepare, report, serve, track, train
from capibara.cli.composition import run_facts
from capibara.core import limits
from capibara.core.types import TryAgain, UserError
from capibara.jobs.sweeps.metrics import Metric
from capibara.monitoring.dashboard.views import files
from capibara.monitoring.reading import reader
from capibara.training.base.state import TrainState

pytestmark = pytest.mark.fault(63)
SECRET = "hunter2-of-somebody-else"
LARGE = 2 << 30  # a sparse file's bytes
WITHIN_S = 30.0
FILES = (
    "config.gin", "metrics.jsonl", "manifest.json", "lineage.jsonl", "plan.json", "paths.json", "loss_curve.png",
    "tokenizer/tokenizer.json", "checkpoints/1/manifest.json", "checkpoints/1/run.json", "trackers/run.json",
)  # fmt: skip
FOLDERS = ("tokenizer", "checkpoints", "checkpoints/1", "trackers")


def make_run(folder, word):
    """A run folder with a checkpoint and everything that a run writes, with a word in each text."""
    folder.mkdir()
    lines = [
        {"kind": "event", "step": 0, "time": 1e9, "event": "start", "total_steps": 2, "device_kind": word},
        {"kind": "train", "step": 1, "time": 1e9 + 1, "loss": 4.0, word: 1.0},
        {"kind": "eval", "step": 2, "time": 1e9 + 2, "loss": 3.0},
        {"kind": "sample", "step": 2, "time": 1e9 + 2, "prompt": word, "text": f"my {word}"},
        {"kind": "event", "step": 2, "time": 1e9 + 3, "event": "end", "reason": "finished"},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.gin").write_text(f"Trainer.steps = 2\nTrainer.init_from = '{word}'\n")
    (folder / "lineage.jsonl").write_text(json.dumps({"eventType": "COMPLETE", "run": {"runId": word}}) + "\n")
    (folder / "plan.json").write_text(json.dumps({"plan": word}))
    (folder / "paths.json").write_text(json.dumps({"X.path": word}))
    (folder / "loss_curve.png").write_bytes(b"\x89PNG\r\n\x1a\n" + word.encode() + b"IEND\xaeB`\x82")
    for name in ("tokenizer/tokenizer.json", "trackers/run.json"):
        (folder / name).parent.mkdir()
        (folder / name).write_text(json.dumps({"uid": word}))
    with Checkpoints(str(folder), Checkpointing()) as checkpoints:
        checkpoints.save(1, TrainState(jnp.int32(1), {"a": jnp.ones(3)}, (), None), {"data": word}, {})
    step = epath.Path(folder / "checkpoints" / "1")
    datasets = [{"path": f"/{word}", "bytes": 1, "sha256": word}]
    saved = manifest.read(step)
    manifest.write(step, dataclasses.replace(saved, about={**saved.about, "datasets": datasets}))
    run_manifest.seal(epath.Path(folder))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run folder, and its twin elsewhere, whose texts hold the secret."""
    folder = tmp_path_factory.mktemp("doors")
    return make_run(folder / "plain", "word"), make_run(folder / "twin", SECRET)


def remove(path):
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def link(run, name, twin):
    remove(run / name)
    (run / name).symlink_to(twin / name)


def pipe(run, name, twin):
    remove(run / name)
    os.mkfifo(run / name)


def device(run, name, twin):
    remove(run / name)
    (run / name).symlink_to("/dev/zero")


def large(run, name, twin):
    os.truncate(run / name, LARGE)


def changed(run, name, twin):
    shutil.copy(twin / name, run / name)
    (run / name).write_bytes((run / name).read_bytes().replace(SECRET.encode(), b"other"))


LAYOUTS = [
    *((link, name) for name in (*FILES, *FOLDERS)),
    *((kind, name) for kind in (pipe, device, large, changed) for name in FILES),
]


def dashboard(run, out):
    """What the dashboard reads and shows of a folder."""
    follows = reader.Reader([str(run)], lambda change: None, scan_s=0.0)
    shown = []
    for _ in range(40):
        follows.look()
        if not follows._large:
            break
        follows._large.wait()
    for one in follows.runs.values():
        shown += [one.fault, files.samples(one, None, None, 5), files.configuration(one), files.pictures(one)]
        shown += [files.picture(one, name) for name in files.pictures(one) if (run / name).is_symlink()]
        shown += [one.start, [*one.events], {kind: [*view.columns] for kind, view in one.views().items()}]
    follows._large.end()
    print(shown)
    for question in (run_facts.checkpoints, run_facts.lineage):
        try:
            print(question(str(run)))
        except (UserError, TryAgain, limits.Refused) as error:
            print(error)


def sweep(run, out):
    print(Metric.parse("eval/loss").read(str(run)))


VERBS = {
    "report": lambda run, out: report.main([str(run), f"--output={out}"]),
    "track": lambda run, out: track.main([str(run), "--to=print", "--timeout=20"]),
    "lineage": lambda run, out: prepare.main(["lineage", str(run)]),
    "lineage of a step": lambda run, out: prepare.main(["lineage", str(run / "checkpoints" / "1")]),
    "dashboard": dashboard,
    "sweep": sweep,
    "list": lambda run, out: convert.main(["list", str(run)]),
    "verify": lambda run, out: convert.main(["verify", str(run)]),
    "infer": lambda run, out: infer.main([f"--model_dir={run}", "--prompt=a"]),
    "evaluate": lambda run, out: evaluate.main([f"--model_dir={run}", "--limit=1"]),
    "serve": lambda run, out: serve.main([f"--model_dir={run}", "--port=0"]),
    "convert": lambda run, out: convert.main([f"--from={run}", f"--to={out}.gguf"]),
    "merge": lambda run, out: merge.main([str(run), str(run), "--method=linear", f"--out={out}.merged"]),
    "train": lambda run, out: train.main([f"--gin.MODEL_DIR='{run}'", "--gin_file=quickstart.gin", "--check"]),
}
# These read only what the hashes of a folder hold for; the others show what they are given.
OF_HASHES = ("infer", "evaluate", "serve", "convert", "merge", "train")


def tried(verb, layout, made, tmp_path, capfd):
    """Gives a hostile folder to a verb; returns its exit code, and all that it has shown."""
    (kind, name), (plain, twin), run, out = layout, made, tmp_path / "run", tmp_path / "out.html"
    shutil.copytree(plain, run, symlinks=True)
    kind(run, name, twin)
    begun_s, code, words = time.monotonic(), 0, ""
    try:
        code = VERBS[verb](run, out) or 0
    except (UserError, TryAgain) as error:
        code, words = 2, str(error)
        assert "\n" not in words and len(words) < 900, (verb, kind.__name__, name, words)
    except SystemExit as error:
        code = error.code
    seconds = time.monotonic() - begun_s
    shown = words + "".join(capfd.readouterr()) + (out.read_text() if out.exists() else "")
    for path in tmp_path.rglob("*.json*"):  # what a verb has written in the folder, or beside it
        shown += path.read_text() if not path.is_symlink() and path.is_file() and path.stat().st_size < 1e6 else ""
    assert SECRET not in shown, (verb, kind.__name__, name, shown[:2000])
    assert "Traceback" not in shown, (verb, kind.__name__, name, shown[-2000:])
    assert seconds < WITHIN_S, (verb, kind.__name__, name, seconds)
    assert not [path for path in twin.rglob("*") if path.stat().st_mtime > made_s(plain)], "it wrote elsewhere"
    shutil.rmtree(run)
    out.unlink(missing_ok=True)
    return code, shown


def made_s(plain):
    return plain.parent.stat().st_mtime + 1.0


@pytest.mark.heavy
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_shows_what_is_not_the_run_s(verb, made, tmp_path, capfd):
    for layout in LAYOUTS:
        code, shown = tried(verb, layout, made, tmp_path, capfd)
        kind, name = layout
        if verb in OF_HASHES:
            assert code == 2, (verb, kind.__name__, name, shown)


@pytest.mark.parametrize(
    ["verb", "layout", "words"],
    [
        ("report", (link, "config.gin"), "the configuration is left out: .*config.gin is a link out of its folder"),
        ("report", (changed, "config.gin"), "config.gin has changed since it was written"),
        ("report", (large, "config.gin"), "must have at most 1,048,576"),
        ("report", (link, "metrics.jsonl"), "metrics.jsonl is a link out of its folder"),
        ("report", (changed, "metrics.jsonl"), "metrics.jsonl has"),
        ("report", (link, "checkpoints"), "the lineage is left out: .*checkpoints is a link"),
        ("track", (link, "metrics.jsonl"), "metrics.jsonl is a link"),
        ("track", (link, "trackers"), "trackers is a link"),
        ("lineage", (link, "manifest.json"), "manifest.json is a link"),
        ("lineage", (link, "checkpoints/1"), "checkpoints/1"),
        ("lineage of a step", (link, "checkpoints/1"), "checkpoints/1 is a link"),
        ("dashboard", (link, "metrics.jsonl"), "is a link out of its folder"),
        ("dashboard", (changed, "config.gin"), "has changed since"),
        ("sweep", (link, "metrics.jsonl"), "is a link out of its folder"),
        ("sweep", (pipe, "metrics.jsonl"), "is a pipe"),
        ("list", (link, "checkpoints/1/manifest.json"), "is a link"),
        ("infer", (link, "tokenizer"), "tokenizer is a link"),
        ("infer", (link, "checkpoints"), "checkpoints is a link"),
    ],
)
def test_what_is_not_the_run_s_is_told(verb, layout, words, made, tmp_path, capfd):
    code, shown = tried(verb, layout, made, tmp_path, capfd)
    assert re.search(words, shown), (code, shown[-2000:])
