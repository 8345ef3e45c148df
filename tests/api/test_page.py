"""docs/python.md runs, block after block, on a small model of the name that it uses."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import matplotlib
import pytest

import capibara as cb
from capibara.cli import train as train_verb
from capibara.multihost import exits

# A class of the designs -> what its block has.
DESIGNS = {
    "ModelBuilder": "lora=cb.Lora(",
    "ConfigManager": "cb.read_run(",
    "LoRAConfigManager": 'base_dtype="nf4"',
    "TPUOptimizer": "cb.plan(",
    "DistributedTrainingManager": "cb.Plan(batch_size=8, node=4)",
    "MetaConsensusSystem": "strategy=consensus",
    "ByzantineConsensus": "cb.Aggregation(rule=cb.Krum()",
    "ConvexityController": '"convexity"',
    "FederatedConsensusStrategy": "cb.FedAdam(",
    "HierarchicalTrainingPipeline": '"hierarchical"',
    "IncrementalSoupStrategy": "cb.merge(",
    "T5XManager": 'format="t5x"',
    "PlaybookConsolidator": "cb.prepare_playbooks(",
    "E2BLogProcessor": "cb.prepare_executions(",
    "MoEDatasetGenerator": "cb.prepare_routing(",
    "AdvancedCheckpointManager": "cb.Checkpointing(",
    "MonitoringDashboard": "cb.dashboard(",
    "TrainingMetrics": "run.frame().to_csv(",
}
SERVES = re.compile(r"cb\.(serve|dashboard)\(")
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"


@pytest.fixture
def there(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink(f"{folder}/hf", "SmolLM2-135M-Instruct")
    os.symlink(f"{folder}/chats.jsonl", "chats.jsonl")
    return tmp_path


def blocks_of(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def run(blocks, page):
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        if not SERVES.search(block):  # until a signal, and with a priority of its own
            exec(compile(block, str(page), "exec"), names)


def answer_of(block: str, path: str, body: bytes | None = None) -> str:
    """What the server of a block answers; it runs in a process of its own, which ends by ctrl-C."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    block, count = re.subn(r"port=\d+", f"port={port}", block)
    assert count == 1
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    with subprocess.Popen(
        [sys.executable, "-c", block], env=environment | {"PYTHONPATH": str(PAGE.parents[1])}
    ) as server:
        try:
            for _ in range(600):
                assert server.poll() is None, "the block has ended"
                with contextlib.suppress(
                    ConnectionError, urllib.error.URLError
                ):  # not yet; an error of HTTP is an answer
                    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body)
                    request.add_header("Content-Type", "application/json")
                    try:
                        with urllib.request.urlopen(request, timeout=300) as answer:
                            return answer.read().decode()
                    except urllib.error.HTTPError as error:
                        raise AssertionError(error.read().decode()) from None
                time.sleep(0.5)
            raise AssertionError("no answer in 300 s")
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(60) in (0, -signal.SIGINT, 130)


def server_of(page):
    (block,) = [block for block in blocks_of(page) if SERVES.search(block)]
    return block


def test_the_blocks_before_the_first_training_run(there, capsys):
    blocks = blocks_of(PAGE)
    first = next(index for index, block in enumerate(blocks) if "cb.finetune(" in block)
    assert first >= 4
    run(blocks[:first], PAGE)
    assert "LanguageModel" in capsys.readouterr().out


def test_every_block_runs(there, capsys):
    matplotlib.use("Agg")
    blocks = blocks_of(PAGE)
    assert len(blocks) >= 10
    run(blocks, PAGE)
    written = {"mine.gguf", "adapter", "loss.png", "answers.html", "merged"}
    assert written <= {path.name for path in there.iterdir()}
    assert "2 prompts" in capsys.readouterr().out


def test_every_block_of_the_designs_names_runs(there):
    page = PAGE.with_name("design_names.md")
    blocks = blocks_of(page)
    run(blocks, page)
    assert (there / "metrics.csv").read_text().startswith("step,")
    assert {path.name for path in (there / "runs").iterdir()} == {"one", "two", "nodes", "t5"}
    assert (there / "soup").is_dir() and (there / "t5x").is_dir() and (there / "data/routing/train.jsonl").exists()


def test_every_class_of_the_designs_has_a_block():
    text = (PAGE.with_name("design_names.md")).read_text()
    code = "\n".join(blocks_of(PAGE.with_name("design_names.md")))
    for name, ours in DESIGNS.items():
        assert f"`{name}" in text and ours in code, name


@pytest.mark.heavy
def test_the_blocks_that_serve_answer(there, capsys):
    cb.finetune("SmolLM2-135M-Instruct", "chats.jsonl", "runs/mine", steps=1, batch_size=8, length=64)
    asked = {"model": "mine", "messages": [{"role": "user", "content": "2 + 1?"}], "max_tokens": 4}
    answer = json.loads(answer_of(server_of(PAGE), "/v1/chat/completions", json.dumps(asked).encode()))
    assert answer["choices"][0]["message"]["role"] == "assistant" and answer["model"] == "mine"
    runs = json.loads(answer_of(server_of(PAGE.with_name("design_names.md")), "/api/runs"))["runs"]
    assert [item["name"] for item in runs] == ["mine"]


def test_its_gin_file_is_a_run(there, capfd):
    (text,) = re.findall(r"^    # mine.gin\n((?:    .*\n)+)", PAGE.read_text(), re.MULTILINE)
    (there / "mine.gin").write_text(re.sub("^    ", "", text, flags=re.MULTILINE))
    flags = ["--gin_file=mine.gin", "--gin.LENGTH=64", "--check"]
    assert exits.run_verb(train_verb.main, flags) == 0, capfd.readouterr().err
