"""The verb `plan`, as a user calls it."""

import dataclasses
import json
import math
import re
import subprocess
import sys

import pytest

from capibara import config
from capibara.cli import plan
from capibara.cli.composition.inspected_run import run_of_gin
from capibara.multihost import exits
from capibara.planner.compiler import compile, compile_cache, proof
from capibara.planner.hardware import slices, topology
from capibara.planner.search import questions

MODEL = "--gin_file=models/capibara_1b.gin"


def run(*argv):
    return exits.run_verb(plan.main, list(argv))


def test_a_model_on_a_slice(capsys, tmp_path):
    out = tmp_path / "new" / "folder" / "plan.json"
    gin, page = tmp_path / "plan.gin", tmp_path / "plan.html"
    files = [f"--json={out}", f"--output={gin}", f"--html={page}"]
    assert run(MODEL, "--slice=v5e-64", "--batch_size=256", "--explain", *files) == 0
    text = capsys.readouterr().out
    assert "predicted" in text and "measured" not in text and "on the torus" in text and "HBM GiB" in text
    plans = json.loads(out.read_text())["plans"]
    assert plans[0]["batch_size"] == 256 and plans[0]["fits"]
    steps = [p["predicted"]["step_s"] for p in plans]
    assert all(after > 0.98 * before for before, after in zip(steps, steps[1:]))
    assert "Plan.batch_size = 256" in gin.read_text()
    text = page.read_text()
    assert text.count("<svg") == text.count("</svg>") == 3 and "Predictions of the cost model" in text
    assert "http" not in text and "<script" not in text  # nothing from elsewhere


def test_slices_that_were_weighed_are_in_all_outputs_and_a_closed_pipe_loses_none(tmp_path):
    """As in `plan ... | head -1`: the reader closes the pipe before the table is printed."""
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    flags = [MODEL, "--goal=cheapest", "--tokens=2e11", "--chips=v5e", f"--json={out}", f"--html={page}"]
    command = [sys.executable, "-m", "capibara.plan", *flags, "--explain", "--top=900"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        child.stdout.close()
        error = child.stderr.read()
    assert child.returncode == exits.EXIT_BROKEN_PIPE
    assert [line for line in error.splitlines() if not line.startswith("searching, ")] == []
    found = json.loads(out.read_text())
    assert [s["slice"] for s in found["slices"]][-1] == "v5e-256" and all(
        "usd" in s["predicted"] for s in found["slices"]
    )
    assert "days and" in page.read_text() and "USD/M tokens" in page.read_text()
    (roofline,) = re.findall(r'aria-label="roofline">(.*?)</svg>', page.read_text())
    ticks = [float(text) for text in re.findall(r"<text [^>]*>([\d.]+)</text>", roofline)]
    assert len(ticks) >= 6 and len(ticks) == roofline.count('class="grid"')
    assert (
        page.read_text().count("<table>") == page.read_text().count('role="region"') - 2
        and "width=device-width" in page.read_text()
    )
    assert f'<tr class="chosen"><td>{found["plans"][0]["slice"]}</td>' in page.read_text()


@pytest.mark.parametrize(
    ("text", "value"), [("20B", 2e10), ("1.5t", 1.5e12), ("300k", 3e5), ("2M", 2e6), ("2e11", 2e11)]
)
def test_numbers_may_have_suffixes(text, value):
    assert questions.count(text) == value


def test_the_flag_of_before_works_for_one_version(capsys):
    assert run(MODEL, "--objective", "target_throughput") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("--objective is now --goal: ") and "needs --tokens_per_s" in second


def test_models_with_fewer_places_than_the_default_have_as_many_as_they_can(capsys):
    assert run("--gin_file=models/gpt2_124m.gin", "--slice=v5e-4") == 0
    assert run("--gin_file=models/gpt2_124m.gin", "--slice=v5e-4", "--length=2048") == 2
    assert "Dataset.length (2048) must be at most DecoderConfig.max_length (1024): try 1024" in capsys.readouterr().err


def test_a_run_whose_user_still_has_to_name_its_files_is_planned(capsys):
    """runs/lora.gin without its initial weights, a task and steps."""
    argv = [
        "--gin_file=models/capibara_8b.gin",
        "--gin_file=runs/lora.gin",
        "--slice=v5e-8",
        "--gin.Lora.base_dtype=nf4",
    ]
    assert run(*argv, "--batch_size=32", "--length=4096", "--explain") == 0
    text = capsys.readouterr().out
    assert "no gradients" not in text and "1 x forward: the base is frozen" in text and "scaling rules" not in text
    assert run("--gin_file=models/capibara_8b.gin", "--slice=v5e-8", "--batch_size=32", "--length=4096") == 2
    assert "no plan fits v5e-8" in capsys.readouterr().err  # all of it trained


GRPO = (
    *(f"--gin_file={name}" for name in ("models/smollm2_1.7b.gin", "tasks/prompts.gin", "runs/grpo.gin")),
    *("--gin.REWARDS=(@exact_answer,)", "--gin.TOKENIZER=unused", "--gin.FILES=('a.jsonl',)", "--gin.MODEL_DIR=unused"),
    *("--slice=v5e-8", "--batch_size=64"),
)


def test_a_run_that_learns_from_rewards_holds_its_reference_and_its_engine(capsys, tmp_path, monkeypatch):
    found = []
    for options in (("Grpo.kl=0.0", "Grpo.where='own'"), ("Grpo.kl=0.0",), ("Grpo.kl=0.1",)):
        options = [f"--gin.{option}" for option in options]
        assert run(*GRPO, *options, f"--json={tmp_path}/plan.json", "--axis=fsdp=8", "--explain") == 0
        assert "reference and engine" in capsys.readouterr().out
        memory = json.loads((tmp_path / "plan.json").read_text())["plans"][0]["predicted"]["memory"]
        found.append((memory["held"], memory["parameters"]))
    (own, _), (alone, parameters), (both, _) = found
    # Of the engine's parameters, in bfloat16, a device has its share as in training, or all on chips of its own; its share
    # of the reference is in float32.
    assert both - alone == pytest.approx(parameters, rel=1e-6)
    length, layers, heads, size, slots, prefixes = 768, 24, 32, 64, 16, 256 * 2**20
    cache = slots * layers * length * 2 * heads * size * 2
    assert alone - prefixes == pytest.approx(parameters / 2 + cache, rel=0.01)
    assert own - prefixes == pytest.approx(8 * parameters / 2 + cache, rel=0.01)
    # As `prove` counts it.
    trainer, v5e = run_of_gin(), slices.parse("v5e-8")
    step = compile_cache.Verdict(compile_cache.Outcome.FITS, compile.Compiled(True, 2**30, 1.0, 15 * 2**30), 1.0)
    monkeypatch.setattr(compile_cache, "verdict", lambda *_, **__: step)
    trainer = dataclasses.replace(trainer, plan=dataclasses.replace(trainer.plan, fsdp=8))
    proven = proof.prove(trainer, proof.Configuration([]), v5e, deadline_s=1.0)
    assert proven.held_bytes == pytest.approx(both, rel=1e-6)


def test_a_split_is_in_all_outputs_and_its_gin_file_is_the_split(capsys, tmp_path):
    out, gin, page = (tmp_path / f"plan.{kind}" for kind in ("json", "gin", "html"))
    files = (f"--json={out}", f"--output={gin}", f"--html={page}", "--include")
    options = (
        "--gin.Grpo.rollout_devices=-1",
        "--gin.Grpo.max_staleness=1",
        "--gin.TRAIN_STEPS=2",
        "--gin.INIT_FROM=None",
    )
    assert run(*GRPO, *options, *files) == 0
    text = capsys.readouterr().out
    best, *others = json.loads(out.read_text())["splits"]
    devices = best["rollout_devices"]
    assert text.startswith(f"{8 - devices} of the 8 devices of v5e-8: {best['plan']}\n") and not others == []
    assert f"the last {devices} draw answers: ServingMesh.tensor = {best['tensor']}" in text
    assert "the last" in page.read_text() and "measured: " not in text
    config.reset()
    config.parse([str(gin)], [], [])
    trainer = run_of_gin()
    assert (trainer.loss.rollout_devices, trainer.loss.max_staleness) == (devices, 1)
    assert (trainer.loss.mesh.tensor, trainer.loss.mesh.data) == (best["tensor"], best["data"])
    assert math.prod(trainer.plan.mesh_shape(8 - devices).values()) == 8 - devices and trainer.plan.slice == "v5e-8"


def test_a_split_is_of_a_slice_that_is_named(capsys):
    argv = [*GRPO[:-2], "--gin.Grpo.rollout_devices=4", "--goal=smallest_slice"]
    assert run(*argv) == 2
    assert (
        "--goal=smallest_slice is for slices that train alone, and Grpo.rollout_devices is 4" in capsys.readouterr().err
    )


def test_a_verified_split_compiles_the_step_of_the_devices_that_train(capsys, monkeypatch):
    seen = []

    def verdict(command, key, **options):
        seen.append((command, key))
        step = compile.Compiled(True, 2**30, 1.0, 15 * 2**30)
        return compile_cache.Verdict(compile_cache.Outcome.FITS, step, 1.0)

    monkeypatch.setattr(compile_cache, "verdict", verdict)
    monkeypatch.setattr(topology, "check", lambda name: None)
    assert run(*GRPO, "--gin.Grpo.rollout_devices=-1", "--verify", "--tries=2") == 0
    text = capsys.readouterr().out
    (command, key), *_ = seen
    assert "--slice=v5e-8" in command and "compiled: " in text
    devices = [item.rpartition(" ")[2] for item in command if "Grpo.rollout_devices = " in item][-1]
    assert f"the last {devices} draw answers" in text and f"rollout_devices={devices}" in key["loss"]


def test_two_files_of_one_model_are_named(capsys):
    assert run("--gin_file=models/tiny.gin", MODEL, "--slice=v5e-64") == 0
    text = capsys.readouterr().out
    assert "note: one model from several files, where later statements win: " in text
    assert run(MODEL, "--slice=v5e-64") == 0 and "several files" not in capsys.readouterr().out


def test_a_run_brings_its_slice_length_and_batch(capsys):
    assert run("--gin_file=base_v5e64.gin") == 0
    assert capsys.readouterr().out.startswith("v5e-64: ")


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "--gin_file has no value"),
        ([MODEL], "--slice has no value and Plan.slice is not bound"),
        ([MODEL, "--slice=v5e-63"], "try v5e-64"),
        ([MODEL, "--slice=v5e-64", "--axis=tensr=2"], "did you mean tensor"),
        ([MODEL, "--slice=v5e-64", "--axis=tensor=two"], "must be like tensor=4"),
        ([MODEL, "--slice=v5e-64", "--headroom=1.5"], "--headroom=1.5 must be from 0 to below 1: try --headroom=0.06"),
        (["--gin_file=models/capibara_120b.gin", "--slice=v5e-16"], "no plan fits v5e-16"),
        ([MODEL, "--slice=v5e-64", "--json=/dev/null/plan.json"], "/dev/null/plan.json cannot be written"),
        ([MODEL, "--slice=v5e-64", "--json=plan.txt", "--html=./plan.txt"], "plan.txt is named for two outputs"),
        ([MODEL, "--slice=v5e-16", "--headroom=0.99"], "is kept free: it fits with --headroom=0."),
        ([MODEL, "--slice=v5e-16", "--batch_size=1000000000"], "is kept free: use a smaller --batch_size"),
        ([MODEL, "--slice=v5e-16", "--include"], "add --output=FILE, or leave it out"),
        (["--gin_file=models/capibara_1bb.gin", "--slice=v5e-16"], "did you mean models/capibara_1b.gin or"),
        (["--gin_file=tasks/text.gin", "--slice=v5e-16"], "configures no model"),
        (
            [MODEL, "--slice=v5e-64", "--tokens=inf"],
            "--tokens=inf must be above 0 and at most 1e+18, e.g. --tokens=2e11",
        ),
        ([MODEL, "--slice=v5e-64", "--tries=0"], "--tries=0 must be above 0 and at most 1e+18, e.g. --tries=6"),
        ([MODEL, "--slice=v5e-64", "--tries=3"], "--tries=3 needs --verify: add that, or leave it out"),
        ([MODEL, "--slice=v5e-64", "--deadline=30"], "--deadline=30 needs --verify"),
        ([MODEL, "--slice=v5e-64", "--chips=v5e"], "--chips=v5e is for goals that look for a slice"),
        ([MODEL, "--slice=v5e-64", "--tokens=20X"], "--tokens: '20X' must be a number, such as 2e10, 20B or 1.5T"),
        ([MODEL, "--slice=v5e-64", "--tokens=1e-300"], "--tokens=1e-300 must be at least 1, e.g. --tokens=2e11"),
        ([MODEL, "--slice=v5e-16", "--batch_size=1000000000000000000"], "must be at most 1000000000: try"),
        ([MODEL, "--slice=v5e-²"], "slice 'v5e-²' must be like v5e-64"),
        ([MODEL, "--slice=v5e-64", "--axis=tensor=²"], "must be like tensor=4"),
        ([MODEL, "--slice=v5e-99999999999999999999"], "try v5e-256"),
        ([MODEL, "--slice="], "--slice is empty: give it a value, or leave it out"),
        ([MODEL, "--slice=v5e-64", "--gin.Plan.slice='foo'"], "slice 'foo' must be like v5e-64"),
        (
            [MODEL, "--slice=v5e-64", "--gin_search_paths=/nonexistent"],
            "--gin_search_paths=/nonexistent must be a folder",
        ),
        (["--gin_file=/usr", "--slice=v5e-64"], "/usr is a folder: name a Gin file in it"),
        (["--gin_file=/usr/none.gin", "--slice=v5e-64"], "no Gin file /usr/none.gin in /usr"),
        ([MODEL, "--goal=smallest_slice", "--axis=tensor=7"], "no mesh of v6e-256 with tensor=7"),
        (
            [
                MODEL,
                "--slice=v5e-64",
                *(f"--axis={a}=1" for a in ("data", "stage", "fsdp", "expert", "context", "tensor")),
            ],
            "the axes multiply to 1, the slice has 64 devices: leave one of them open",
        ),
        ([MODEL, "--slice=v5e-4", "--headroom=0.99999"], "v5e has 15.75 usable and 99.999% of it is kept free"),
        ([MODEL, "--slice=v5e-64", "--usd_per_chip_hour=nan"], "--usd_per_chip_hour is nan, must be at least 0"),
        ([MODEL, "--chips=v5e,v6x", "--goal=smallest_slice"], "chip 'v6x' is not known: did you mean v6"),
        ([MODEL, "--slice=v5e-64", "--axis=fsdp=8", "--axis=fsdp=16"], "--axis=fsdp is given 2 times"),
        (
            [MODEL, "--slice=v5e-64", "--goal=largest_batch", "--batch_size=64"],
            "which chooses it: leave one out",
        ),
        ([MODEL, "--slice=v5e-64", "--max_days=3", "--tokens=1e9"], "--max_days is for --goal=cheapest"),
        ([MODEL, "--slice=v5e-64", "--goal=cheapest"], "which chooses one: use --chips instead"),
        ([MODEL, "--goal=target_throughput"], "needs --tokens_per_s"),
        ([MODEL, "--slice=h100-8", "--verify"], "has no TPUs"),
        ([MODEL, "--slice=v5e-16", "--axis=tensor=32"], "the axes must divide its 16 devices"),
        (
            [MODEL, "--slice=v5e-16", "--state_dtypes=float32,bfloat8"],
            "must be of float32, bfloat16, int8: did you mean bfl",
        ),
        (
            [MODEL, "--slice=v5e-16", "--state_dtypes=int8", "--gin.Optimizer.name='adafactor'"],
            "with Optimizer.name adafactor",
        ),
        ([MODEL, "--slice=v5e-16", "--axis=context=4", "--length=100"], "rows of 100 must be a multiple of 8"),
        ([MODEL, "--slice=v5e-16", "--axis=stage=8"], "stages must divide the 20 layers"),
        ([MODEL, "--slice=v5e-16", "--axis=expert=2"], "the model has no experts"),
        (
            ["--gin_file=models/capibara_125m.gin", "--slice=v5e-16", "--axis=tensor=4"],
            "tensor (4) must divide kv_heads of",
        ),
        ([MODEL, "--slice=2xv5e-256", "--axis=fsdp=1", "--axis=data=1"], "no mesh of 2xv5e-256"),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys):
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_what_is_bound_reaches_the_plan_or_is_named(capsys, tmp_path):
    """Dataset.length and Plan.batch_size are used, searched fields are reported, and --include is self-contained."""
    plan_file = tmp_path / "plan.gin"
    flags = [
        "--gin.Dataset.length=1024",
        "--gin.Plan.batch_size=64",
        "--gin.Plan.remat=full",
        "--gin.DecoderConfig.num_layers=8",
    ]
    assert run(MODEL, *flags, "--slice=v5e-16", f"--output={plan_file}", "--include") == 0
    text = capsys.readouterr().out
    assert "a step of 65,536 tokens" in text
    assert "note: chosen by the search, ignoring the Gin files: Plan.remat; --axis=NAME=N fixes a size" in text
    config.reset()
    config.parse([str(plan_file)], [], [])
    again = run_of_gin()
    assert (again.dataset.length, again.plan.batch_size, again.model.num_layers) == (1024, 64, 8)


def test_narrower_moments_are_weighed_where_asked_for(capsys, tmp_path):
    """8 B parameters do not fit 8 chips with float32 moments."""
    model, plan_file = "--gin_file=models/capibara_8b.gin", tmp_path / "plan.gin"
    assert run(model, "--slice=v5e-8") == 2
    assert "no plan fits v5e-8" in capsys.readouterr().err
    assert run(model, "--slice=v5e-8", "--state_dtypes=float32,int8", f"--output={plan_file}", "--include") == 0
    assert "int8 optimizer state" in capsys.readouterr().out
    config.reset()
    config.parse([str(plan_file)], [], [])
    assert str(run_of_gin(2048).optimizer.state_dtype) == "int8"


def test_a_plan_says_its_moments_where_the_run_has_others(capsys, tmp_path):
    plan_file = tmp_path / "plan.gin"
    flags = ["--gin.Optimizer.state_dtype='int8'", "--state_dtypes=float32", f"--output={plan_file}", "--include"]
    assert run(MODEL, "--slice=v5e-16", *flags) == 0
    config.reset()
    config.parse([str(plan_file)], [], [])
    assert str(run_of_gin(2048).optimizer.state_dtype) == "float32"


def test_a_plan_that_stands_alone_finds_the_users_own_files(capsys, tmp_path):
    mine, plan_file = tmp_path / "mine", tmp_path / "plan.gin"
    mine.mkdir()
    (mine / "model.gin").write_text('include "models/capibara_1b.gin"\nDecoderConfig.num_layers = 8\n')
    flags = [
        f"--gin_search_paths={mine}",
        "--gin_file=model.gin",
        "--slice=v5e-16",
        f"--output={plan_file}",
        "--include",
    ]
    assert run(*flags) == 0
    config.reset()
    config.parse([str(plan_file)], [], [])
    assert run_of_gin(2048).model.num_layers == 8


def test_a_plan_that_fails_leaves_nothing(capsys, tmp_path):
    out = tmp_path / "new" / "folder" / "plan.gin"
    assert run("--gin_file=models/capibara_120b.gin", "--slice=v5e-16", f"--output={out}") == 2
    assert "no plan fits v5e-16" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "json_, html, message",
    [
        ("new/a.json", "new", "cannot be written"),
        ("new/a.json", "new/a.json/b.html", "cannot be written"),
        ("new/" + "a" * 300, "b.html", "cannot be written"),
        ("real.json", "link.json", "is named for two outputs"),
        ("dangling.json", "model.gin", "is read as a Gin file"),
        ("dangling.json", "above.gin", "is read as a Gin file"),
        ("", "b.html", "--json is empty: give it a value, or leave it out"),
    ],
)
def test_outputs_that_cannot_be_are_seen_first_and_nothing_is_left(json_, html, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "above.gin").write_text('include "models/capibara_1b.gin"\n')
    (tmp_path / "model.gin").write_text('include "above.gin"\n')
    (tmp_path / "link.json").symlink_to("real.json")
    (tmp_path / "dangling.json").symlink_to("nowhere.json")
    before = {path.name: path.is_symlink() or path.read_text() for path in tmp_path.iterdir()}
    assert run("--gin_file=model.gin", "--slice=v5e-16", f"--json={json_}", f"--html={html}") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert {path.name: path.is_symlink() or path.read_text() for path in tmp_path.iterdir()} == before


def test_a_slice_is_chosen(capsys, monkeypatch):
    monkeypatch.setattr(
        "capibara.monitoring.status._PLAIN_AFTER_S", 0.0
    )  # a fast machine says nothing of a short search
    assert run(MODEL, "--goal=cheapest", "--tokens=1e11", "--chips=v5e", "--top=1") == 0
    captured = capsys.readouterr()
    assert "USD/M tokens" in captured.out and "> " in captured.out and "searching" in captured.err


def test_generation_is_planned(capsys, tmp_path):
    out, gin = tmp_path / "plan.json", tmp_path / "serve.gin"
    flags = ["--serve", "--length=2048", f"--json={out}", f"--output={gin}"]
    assert run("--gin_file=models/llama3_70b.gin", "--slice=v6e-16", *flags) == 0
    text = capsys.readouterr().out
    assert "on v6e-16, 4 host(s): tensor=8 x data=2" in text and "predicted" in text and "measured" not in text
    plans = json.loads(out.read_text())["predicted"]
    assert plans[0]["fits"] and plans[0]["tensor"] == 8 and {one["engine"]["length"] for one in plans} > {2048, 8192}
    assert f"EngineConfig.slots = {plans[0]['slots']}\n" in gin.read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gin_file=models/llama3_70b.gin", "--slice=v5e-4"], "may use 14.80: try --slice=v6e-8"),
        (["--gin_file=models/bert_base.gin", "--slice=v5e-4"], "is for models that generate"),
        ([MODEL, "--slice=v5e-4", "--batch_size=4"], "--batch_size is for training"),
        ([MODEL, "--slice=v5e-4", "--include", "--output=x.gin"], "--include is for training"),
        ([MODEL, "--slice=v5e-4", "--explain"], "--explain is for training"),
        ([MODEL, "--slice=v5e-4", "--headroom=-1"], "--headroom=-1.0 must be from 0"),
        ([MODEL], "--slice has no value"),
    ],
)
def test_generation_that_cannot_be_planned(capsys, flags, said):
    assert run("--serve", *flags) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
