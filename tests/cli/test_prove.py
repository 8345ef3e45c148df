"""The verb `prove`, and `plan --verify`; with the real TPU compiler if libtpu is installed."""

import importlib.util
import json
import math
import os

import pytest

from capibara.cli import plan, prove
from capibara.multihost import exits

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
SMALL = """
DecoderConfig.vocab_size = 1024
DecoderConfig.embed_dim = 256
DecoderConfig.num_layers = 4
DecoderConfig.num_heads = 2
DecoderConfig.mlp_dim = 512
DecoderConfig.dtype = "bfloat16"
"""
ANSWERS = ("--gin_file=models/smollm2_135m.gin", "--gin_file=tasks/prompts.gin", "--gin_file=runs/grpo.gin") + tuple(
    f"--gin.{name}={value}"
    for name, value in (("MODEL_DIR", "'run'"), ("INIT_FROM", "'base'"), ("TOKENIZER", "'base'"), ("TRAIN_STEPS", 2))
    + (("FILES", "('sums.jsonl',)"), ("REWARDS", "(@numeric_answer,)"))
)
OPEN = ("--gin.Plan.slice='v5e-16'", "--length=4096")  # a run whose mesh is open


def run(verb, *argv):
    return exits.run_verb(verb.main, list(argv))


@needs_libtpu
def test_a_verified_plan_is_proven_and_what_it_wrote_is_the_same_step(tmp_path, monkeypatch, capsys):
    """One compile of a small model for v5e:2x2 serves the search's plan, its Gin file and `prove`."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    model, chosen, found = (str(tmp_path / name) for name in ("model.gin", "plan.gin", "plan.json"))
    (tmp_path / "model.gin").write_text(SMALL)
    flags = ["--length=512", "--batch_size=8", "--axis=fsdp=4", "--slice=v5e-4", "--tries=1"]
    assert run(plan, f"--gin_file={model}", *flags, "--verify", f"--output={chosen}", f"--json={found}") == 0
    text = capsys.readouterr().out
    assert "compiled: fsdp=4" in text and "fits, peak" in text
    verdict = json.loads((tmp_path / "plan.json").read_text())["plans"][0]["verdict"]
    assert verdict["outcome"] == "fits" and verdict["versions"]["libtpu"]
    compiled = verdict["compiled"]
    # Layers: 4 x (4 x 256 x 256 + 3 x 256 x 512); the head, 1024 x 256, is tied; 3 or, with remat, 4 forwards' FLOPs.
    tokens, layers, head = 8 * 512 // 4, 4 * (4 * 256 * 256 + 3 * 256 * 512), 1024 * 256
    flops = compiled["costs"]["matmul_flops"]
    assert 0.95 * 2 * tokens * 3 * (layers + head) < flops < 1.05 * 2 * tokens * 4 * (layers + head)
    assert compiled["chip"] == "v5e" and compiled["limit_bytes"] == math.floor(15.75 * 2**30)
    # Parameters and two moments in float32 over four chips, and a batch.
    assert 3 * 4 * (layers + head) / 4 < compiled["argument_bytes"] < compiled["peak_bytes"] < 2**30
    assert any(name.startswith("splash") for name in compiled["costs"]["kernels"])
    assert f"Compiled on {verdict['date']}" in (tmp_path / "plan.gin").read_text()

    files = [f"--gin_file={model}", f"--gin_file={chosen}"]
    assert run(prove, *files, "--length=512", "--deadline=0.001") == 0  # cached: nothing is compiled again
    text = capsys.readouterr().out
    assert text.startswith("v5e-4: fits (compiled earlier") and "kernels: splash" in text and "all-gather" in text
    # Another batch is another step, for which there is no time.
    assert run(prove, *files, "--length=512", "--gin.Plan.batch_size=12", "--deadline=0.001") == 2
    assert capsys.readouterr().err.endswith(
        "error: stopped after --deadline=0.001 s: a compile takes 40 s to some minutes, try --deadline=1800\n"
    )


def test_the_verdict_is_not_written_over_what_is_read(capsys, tmp_path):
    model = tmp_path / "mine.gin"
    model.write_text(SMALL)
    for name, message in ((str(model), "mine.gin is read as a Gin file"), ("", "--json is empty")):
        assert run(prove, f"--gin_file={model}", "--slice=v5e-4", f"--json={name}", "--deadline=1") == 2
        assert message in capsys.readouterr().err and model.read_text() == SMALL


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "--gin_file has no value"),
        (["--gin_file=models/capibara_1b.gin"], "--slice has no value and Plan.slice is not bound"),
        (["--gin_file=models/capibara_1b.gin", "--slice=v5e-63"], "try v5e-64"),
        (["--gin_file=models/capibara_1b.gin", "--slice=h100-8"], "has no TPUs"),
        (["--gin_file=tasks/text.gin", "--slice=v5e-16"], "configures no model"),
        (
            ["--gin_file=models/capibara_1b.gin", "--gin_file=models/t5_base.gin", "--slice=v5e-16"],
            "configures several models (EncoderDecoderConfig and DecoderConfig): keep one",
        ),
        (
            ["--gin_file=slices/v5e-64/capibara_1b.gin", "--slice=v5e-16"],
            "needs 64 devices, v5e-16 has 16: set one axis to -1\n",
        ),
        (
            [*ANSWERS, "--slice=v5e-8", "--gin.Grpo.rollout_devices=8"],
            "Grpo.rollout_devices is 8, must be below the 8 devices of the run: try 4",
        ),
        (
            [*ANSWERS, "--slice=v5e-8", "--gin.Grpo.rollout_devices=4", "--gin.Plan.fsdp=8"],
            "needs 8 devices, v5e-8 without rollout_devices has 4: set one axis to -1",
        ),
        (
            [*ANSWERS, "--slice=v5e-8", "--gin.Grpo.rollout_devices=3", "--gin.Plan.fsdp=5"],
            "Grpo.rollout_devices is 3, and v5e-8 (2x4) has no box of 5 devices that train",
        ),
        (
            [*ANSWERS, "--slice=v5e-16", "--gin.Grpo.rollout_devices=8", "--gin.Plan.fsdp=8"],
            "Grpo.rollout_devices is 8, and v5e-16 has 4 hosts with a process each: drawing beside training is for one",
        ),
        (
            [*ANSWERS, "--slice=v5e-8", "--gin.Grpo.rollout_devices=-1", "--gin.Plan.fsdp=4"],
            "Grpo.rollout_devices is -1, which the planner replaces where it chooses the mesh: set Plan.slice",
        ),
        (
            ["--gin_file=models/capibara_8b.gin", *OPEN, "--gin.Plan.remat='none'", "--gin.Plan.batch_size=16"],
            "it fits with a plan that capibara plan --headroom=0.008 --output=plan.gin writes",
        ),
        (
            ["--gin_file=models/capibara_1b.gin", *OPEN, "--gin.Plan.batch_size=64", "--gin.Plan.accumulation=3"],
            "batch_size (64) must be a multiple of Plan.accumulation (3): try 63",
        ),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys):
    assert run(prove, *argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err
