"""Run folders that come from others, that have changed, and that have lost something: refused by name, nothing executed."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import sys

import pytest

from capibara import config
from capibara.checkpoints import inspection, run_manifest, step_folders
from capibara.core.types import UserError
from capibara.training import run_folder

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "integration"))

SHORT = ("--gin_file=tiny.gin", "--emulate=8", "--gin.Checkpointing.every=2", "--gin.Monitoring.more=()")
TOKENIZER = ("--gin.Dataset.vocabulary=@TokenizerJsonVocabulary()", "--gin.TokenizerJsonVocabulary.path=tok")
PROMPT = ("--prompt=river", "--gin.Sampling.max_new_tokens=2", "--gin.Sampling.temperature=0")


@pytest.fixture(scope="module")
def trained(shell, made_here, toy_tokenizer):
    """A run with steps 2 and 4 and a tokenizer of its own, and the same model as a Hugging Face folder."""
    shutil.copytree(toy_tokenizer, shell.folder / "tok")
    made_here("train", *SHORT, *TOKENIZER, "--gin.TRAIN_STEPS=4")
    made_here("convert", "--from=run", "--to=hf")
    return shell


@pytest.fixture
def run(trained, here):
    """A copy of the run that may be changed; the name of its folder."""
    target = trained.folder / "copy"
    for folder in (target, trained.folder / "new"):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(trained.folder / "run", target)
    yield target
    shutil.rmtree(target, ignore_errors=True)


def readers(folder):
    """Each verb that opens a run folder."""
    return {
        "infer": ("infer", f"--model_dir={folder}", *PROMPT),
        "evaluate": ("evaluate", f"--model_dir={folder}", "--limit=1"),
        "convert": ("convert", f"--from={folder}", f"--to={folder}.gguf"),
        "resume": ("train", *SHORT, *TOKENIZER, f"--gin.MODEL_DIR={folder}", "--gin.TRAIN_STEPS=6"),
        "begin from": ("train", *SHORT, *TOKENIZER, "--gin.MODEL_DIR=new", f"--gin.Trainer.init_from={folder}"),
    }


def assert_refused(done, *words):
    lines = done.err.strip().splitlines()
    assert done.code == 2 and lines[-1].startswith("error: ") and "Traceback" not in done.err, done
    assert all(word in lines[-1] for word in words), (words, lines[-1])


def sealed(folder, text):
    """The folder with this at the end of its configuration, and hashes that fit, as an attacker makes them."""
    with open(folder / "config.gin", "a") as file:
        file.write(f"\n{text}\n")
    run_manifest.seal(run_manifest.folder_of(folder))
    return folder


EVIL = {
    "import evil": "import evil",
    "from evil import x": "import x",
    "import os.path as p": "import os.path",
    "from __gin__ import dynamic_registration\nimport evil": "dynamic_registration",
    'include "evil.gin"': "include 'evil.gin'",
    'include "/etc/hostname"': "include",
    "Trainer.seed = @evil.run()": "no configurable named",
    "Trainer.loss = @gin.singleton()": "gin.singleton is refused",
    "Trainer.model = @x/PassAtK()": "@x/PassAtK is refused",
    "x/EvalTask.files = ('a',)": "EvalTask is refused",
    "ServerConfig.queue = 5": "ServerConfig is refused",
    "Harness.chat = True": "Harness is refused",
    "Dataset.task_module = 'evil'": "names the module evil",
    "MODULE = 'evil'\nDataset.task_module = %MODULE": "names the module evil",
    "x/Dataset.task_module = 'evil'": "names the module evil",
    "SeqioEvaluation.task_module = 'evil'": "names the module evil",
    "RECORDED_IMPORTS = ('evil',)\nTrainer.loss = @my_loss()": "the run imported evil",
    "A = (%B,)\nB = (%A,)\nTrainer.seed = %A": "refers to itself",
    "\n".join(["A0 = 1", *(f"A{i} = (%A{i - 1}, %A{i - 1})" for i in range(1, 64)), "Trainer.seed = %A63"]): "values",
    f"Trainer.seed = {'(' * 5000}{')' * 5000}": "nested",
    f"Trainer.seed = {'9' * 9999}": "Trainer.seed",
}


@pytest.mark.fault(52)
@pytest.mark.parametrize("text", EVIL)
def test_a_recorded_configuration_is_data(trained, run, here, text):
    (trained.folder / "evil.py").write_text("open('EXECUTED', 'w').close()\nx = 1\n")
    (trained.folder / "evil.gin").write_text("import evil\n")
    sealed(run, text)
    done = here("infer", f"--model_dir={run}", *PROMPT)
    assert_refused(done, EVIL[text])
    assert len(done.err) < 2500 and not (trained.folder / "EXECUTED").exists() and "evil" not in sys.modules


@pytest.mark.fault(52)
def test_no_verb_runs_it(trained, run, here):
    (trained.folder / "evil.py").write_text("open('EXECUTED', 'w').close()\n")
    sealed(run, "import evil")
    for verb, args in readers(run).items():
        if verb not in ("resume", "begin from"):  # these compare what is recorded, and parse none of it
            assert_refused(here(*args), "import evil is refused")
    for verb in ("resume", "begin from"):
        assert here(*readers(run)[verb]).code == 0
    assert not (trained.folder / "EXECUTED").exists() and "evil" not in sys.modules


@pytest.mark.fault(52)
def test_a_hugging_face_folder_is_read_by_its_config_json(trained, here):
    folder = trained.folder / "hf"
    (trained.folder / "evil.py").write_text("open('EXECUTED', 'w').close()\n")
    (folder / "config.gin").write_text("import evil\n")
    (folder / "manifest.json").write_text("{}")
    (folder / "checkpoints").mkdir(exist_ok=True)
    done = here("infer", f"--model={folder}", *PROMPT)
    assert done.code == 0 and not (trained.folder / "EXECUTED").exists(), done.err


@pytest.mark.fault(52)
def test_modules_beside_a_model_are_not_imported(trained, tmp_path):
    """The working directory is a folder that was downloaded, with modules of names that are imported, and one of ours."""
    for name in ("numpy", "jinja2", "fsspec", "capibara_extras", "torch", "gguf", "readline", "jax"):
        (tmp_path / f"{name}.py").write_text("open('EXECUTED', 'w').close()\nraise SystemExit(3)\n")
    shell = type(trained)(tmp_path)
    for verb, args in (("infer", (f"--model={trained.folder / 'hf'}", *PROMPT)), ("convert", ("verify", "nothing"))):
        done = shell.run(verb, *args)
        assert done.code == (0 if verb == "infer" else 2) and not (tmp_path / "EXECUTED").exists(), done.err


@pytest.mark.fault(52)
def test_modules_of_the_users_are_named_or_trusted(trained, run, here):
    """A reward of the user's: in the record by name; imported where the command imports it, or trusts the folder."""
    (trained.folder / "my_words.py").write_text(
        "import capibara.config\n@capibara.config.configurable\ndef my_texts(count=1):\n    return ()\n"
    )
    (trained.folder / "mine.gin").write_text("import my_words\n")
    with open(run / "config.gin", "a") as file:
        file.write("\nMonitoring.more = @my_texts()\nmy_texts.count = 2\n")
    text = (run / "config.gin").read_text()
    (run / "config.gin").write_text("RECORDED_IMPORTS = ('my_words',)\n" + text)
    run_manifest.seal(run_manifest.folder_of(run))
    infer = ("infer", f"--model_dir={run}", *PROMPT)
    assert_refused(here(*infer), "the run imported my_words", "--trust_config")
    assert "my_words" not in sys.modules
    for given in ("--trust_config", "--gin_file=mine.gin"):
        done = here(*infer, given)
        assert done.code == 0, done.err
        assert sys.modules.pop("my_words")


@pytest.mark.fault(52)
def test_what_a_run_imports_is_recorded_as_a_name(trained):
    (trained.folder / "my_marks.py").write_text(
        "import capibara.config\n@capibara.config.configurable\ndef my_marks(count=1):\n    return count\n"
    )
    (trained.folder / "marks.gin").write_text("import my_marks\nmy_marks.count = 3\n")
    before = os.getcwd()
    os.chdir(trained.folder)
    try:
        config.parse(["marks.gin"])
        config.build(sys.modules["my_marks"].my_marks)
        text = config.operative()
    finally:
        os.chdir(before)
    assert "RECORDED_IMPORTS = ('my_marks',)" in text and "\nimport" not in f"\n{text}" and "my_marks.count = 3" in text
    config.parse([], recorded=config.Recorded(text, "config.gin", trusted=True))


def flipped(path, at, bit):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.fault(53)
@pytest.mark.parametrize(
    "name",
    [
        "config.gin",
        *(pytest.param(name, marks=pytest.mark.heavy) for name in ("paths.json", "tokenizer/chat_template.jinja")),
        "tokenizer/tokenizer.json",
    ],
)
def test_one_flipped_bit_is_refused_by_every_verb(trained, run, here, name):
    content = (run / name).read_bytes()
    word = {"config.gin": b"norm_eps = ", "tokenizer/tokenizer.json": b'"vocab"'}.get(name)
    flipped(run / name, content.index(word) + len(word) if word else len(content) // 2, 0)
    for args in readers(run).values():
        assert_refused(here(*args), name, "has changed since it was written", "capibara convert seal")
    done = here("convert", "verify", str(run))
    assert done.code == 1 and f"{name} has changed since it was written" in done.out, done
    serve = trained.run("serve", f"--model_dir={run}", "--port=0")
    assert_refused(serve, name, "has changed since it was written")
    assert here("convert", "seal", str(run)).code == 0 and here("convert", "verify", str(run)).code == 0


@pytest.mark.fault(53)
def test_a_file_that_was_added_to_a_tokenizer_is_refused(run, here):
    (run / "tokenizer" / "added_tokens.json").write_text('{"x": 999}')
    assert_refused(here(*readers(run)["infer"]), "tokenizer/added_tokens.json was added since")
    (run / "tokenizer" / "added_tokens.json").unlink()
    (run / "tokenizer" / "tokenizer.json").unlink()
    assert_refused(here(*readers(run)["infer"]), "tokenizer/tokenizer.json is gone")
    (run / "manifest.json").unlink()
    assert_refused(here(*readers(run)["infer"]), "manifest.json is gone, which has the hash of config.gin")
    done = here("convert", "verify", str(run))
    assert done.code == 1 and "manifest.json is gone" in done.out


@pytest.mark.fault(53)
def test_another_tokenizer_at_its_first_place_changes_nothing_and_ends_training(trained, run, here):
    """What a run has learnt is read with its own tokenizer; to train on with another one is refused."""
    path = trained.folder / "tok" / "tokenizer.json"
    text = path.read_text()
    before = here(*readers(run)["infer"])
    try:
        path.write_text(text.replace('"!":', '"\\u0021 ":', 1))
        assert path.read_text() != text
        assert here(*readers(run)["infer"]).out == before.out and before.code == 0
        assert_refused(here(*readers(run)["resume"]), "the tokenizer of tok is not the one with which")
    finally:
        path.write_text(text)


@pytest.mark.fault(53)
def test_a_crash_between_two_writes_leaves_a_whole_folder(tmp_path, monkeypatch):
    """Of the manifest, of a file, and of the manifest again: after each the folder is as it was, or as it was to be."""
    from capibara.storage.disk import DiskStore

    folder = run_manifest.folder_of(tmp_path)
    run_manifest.replace(folder, {"config.gin": b"A = 1\n", "paths.json": b"{}\n"})
    write = DiskStore.write_atomic
    for stops_after in range(5):
        left = [stops_after]

        def crashing(store, path, data):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            write(store, path, data)

        monkeypatch.setattr(DiskStore, "write_atomic", crashing)
        new = {"config.gin": b"A = 2\n", "paths.json": b"{} \n", "tokenizer/tokenizer.json": b"{}"}
        with pytest.raises(KeyboardInterrupt):
            run_manifest.replace(folder, new)
        run_manifest.check(folder)
    monkeypatch.setattr(DiskStore, "write_atomic", write)
    run_manifest.replace(folder, new)
    assert run_manifest.faults(folder, run_manifest.read(folder)) == []
    (tmp_path / "config.gin").write_bytes(b"A = 1\n")
    with pytest.raises(UserError, match="config.gin has changed since it was written"):
        run_manifest.check(folder)


@pytest.mark.fault(53)
@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.heavy)])
def test_flips_over_all_files_of_a_run_folder_are_found(run, count):
    """Every file has its share of the flips, its first and its last byte among the places; `verify` names the file."""
    rng, folder = random.Random(count), pathlib.Path(run)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    top = [path for path in files if "checkpoints" not in path.parts]
    assert {"config.gin", "metrics.jsonl", "loss_curve.png", "paths.json"} <= {path.name for path in top}
    silent = []
    for index in range(count):
        path = top[index // 2 % len(top)] if index % 2 else rng.choice(files)
        content = path.read_bytes()
        if not content:
            continue
        flipped(path, rng.choice([0, len(content) - 1, rng.randrange(len(content))]), rng.randrange(8))
        rows = inspection.Inspection(str(folder)).verified()
        told = " ".join(fault for row in rows for fault in row["faults"])
        if path.name not in told:
            silent.append((str(path.relative_to(folder)), told))
        path.write_bytes(content)
    assert silent == []
    assert not any(row["faults"] for row in inspection.Inspection(str(folder)).verified())


def manifests(folder):
    return sorted((folder / "checkpoints").glob("*/manifest.json"), key=lambda path: int(path.parent.name))


@pytest.mark.fault(54)
@pytest.mark.parametrize(
    "what",
    [
        "all manifests",
        *(pytest.param(w, marks=pytest.mark.heavy) for w in ("all steps", "the folder of the steps")),
        "the run's manifest too",
    ],
)
def test_a_run_that_has_lost_its_checkpoints_is_not_a_new_one(trained, run, here, what):
    for path in manifests(run):
        path.unlink() if what != "all steps" else shutil.rmtree(path.parent)
    if what == "the folder of the steps":
        shutil.rmtree(run / "checkpoints")
    if what == "the run's manifest too":
        (run / "manifest.json").unlink()
        assert_refused(here(*readers(run)["resume"]), "manifest.json is gone")
        (run / "config.gin").unlink()  # metrics.jsonl alone says that there were checkpoints
        (run / "paths.json").unlink()
    before = sorted(str(path) for path in run.rglob("*") if path.is_file())
    done = here(*readers(run)["resume"])
    assert_refused(done, "holds none of the checkpoints that the run records", "--start_over")
    assert "compiling" not in done.out  # nothing was compiled for it
    assert sorted(str(path) for path in run.rglob("*") if path.is_file()) == before
    done = here("convert", "verify", str(run))
    assert done.code == 1 and "the run committed it: " in done.out, done
    done = here(*readers(run)["resume"], "--start_over")
    assert done.code == 0 and f"{run} was renamed to copy.old1" in done.out, done.err
    assert sorted(str(path) for path in (run.parent / "copy.old1").rglob("*") if path.is_file()) == [
        path.replace("/copy/", "/copy.old1/") for path in before
    ]
    assert [path.parent.name for path in manifests(run)] == ["2", "4", "6"]
    shutil.rmtree(run.parent / "copy.old1")


@pytest.mark.fault(54)
@pytest.mark.parametrize("what", ["its manifest", "its folder"])
def test_without_the_newest_step_the_one_before_is_used_and_it_is_said(trained, run, here, what, caplog):
    newest = manifests(run)[-1]
    newest.unlink() if what == "its manifest" else shutil.rmtree(newest.parent)
    reason = "manifest.json is gone" if what == "its manifest" else "its folder is gone"
    done = here("convert", "verify", str(run))
    assert done.code == 1 and f"the run committed it: {reason}" in done.out
    done = here(*readers(run)["infer"])
    assert done.code == 0 and f"{run}: step 2 is used, not step 4: {reason}" in caplog.text, done.err
    done = here(*readers(run)["resume"])
    assert done.code == 0 and "from step 2" in done.out and f"checkpoints/4 is corrupted: {reason}" in caplog.text, done
    assert (run / "checkpoints" / "4.corrupted").exists() == (what == "its manifest")  # quarantined, not removed
    assert here("convert", "verify", str(run)).code == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["checkpoints_corrupted"] for r in records if "checkpoints_corrupted" in r] == [1.0] * 4


@pytest.mark.fault(54)
def test_a_run_that_never_saved_may_begin(trained, here, tmp_path):
    """It recorded its configuration, and was killed before or in the middle of its first save."""
    folder = run_manifest.folder_of(tmp_path)
    run_manifest.replace(folder, {"config.gin": b"A = 1\n"})
    (tmp_path / "metrics.jsonl").write_text('{"kind": "event", "step": 4, "time": 1, "event": "checkpoint"}\n')
    (tmp_path / "checkpoints" / "4" / "state").mkdir(parents=True)
    run_folder.check_resumable(str(tmp_path))
    assert step_folders.lost(folder / "checkpoints") == []


@pytest.mark.fault(54)
@pytest.mark.parametrize("event", ["start", "roll_back"])
def test_steps_that_a_run_went_back_before_are_not_lost(tmp_path, event):
    """Metrics alone say what there was: a run that went back to step 4, or began again there, has no step 8."""
    events = (("checkpoint", 4), ("checkpoint", 8), (event, 4))
    records = [json.dumps({"kind": "event", "event": name, "step": step, "time": 1}) for name, step in events]
    (tmp_path / "metrics.jsonl").write_text("\n".join(records))
    assert run_manifest.recorded_steps(run_manifest.folder_of(tmp_path)) == {4}


@pytest.mark.fault(54)
def test_start_over_leaves_a_run_that_writes_alone(trained, run, here):
    from capibara.checkpoints.lease import Lease

    lease = Lease(run_manifest.folder_of(run) / "checkpoints")
    try:
        assert_refused(here(*readers(run)["resume"], "--start_over"), "is being written by process")
    finally:
        lease.release()
    assert [path.parent.name for path in manifests(run)] == ["2", "4"]


@pytest.mark.fault(54)
def test_a_restart_by_a_launcher_does_not_start_over_again(trained, run, monkeypatch):
    permit = run.parent / "permit"
    permit.touch()
    monkeypatch.setenv("CAPIBARA_START_OVER", str(permit))
    run_folder.start_over(str(run))
    assert not run.exists() and not permit.exists()
    shutil.move(run.parent / "copy.old1", run)  # stands for what the first start has written
    run_folder.start_over(str(run))
    assert [path.parent.name for path in manifests(run)] == ["2", "4"]
