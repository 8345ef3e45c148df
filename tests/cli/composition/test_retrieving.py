"""Indices that Gin files name, with the models that embed their queries."""

from __future__ import annotations

import json

import pytest

import capibara as cb
from capibara.cli.composition import retrieving
from capibara.core.types import UserError
from capibara.evaluate import main
from capibara.multihost.exits import run_verb
from capibara.strategies.environments.functions import FunctionTools
from tests.retrieval.conftest import TINY, documents, embedder, folder, model  # noqa: F401 - fixtures


def trainer(environment):
    loss = cb.Grpo(rewards=(cb.exact_answer,), environment=environment)
    return cb.Trainer(
        model_dir="run",
        steps=1,
        model=TINY,
        plan=cb.Plan(batch_size=8),
        dataset=cb.Dataset(
            source=cb.PromptJsonlSource(files=("prompts.jsonl",), template=cb.ChatTemplate(tokenizer="tokenizer")),
            vocabulary=cb.ByteVocabulary(),
            length=512,
            packing="none",
        ),
        optimizer=cb.Optimizer(schedule=cb.Schedule(kind="constant", learning_rate=0.1)),
        loss=loss,
    )


def test_a_run_that_searches_opens_its_index(folder):  # noqa: F811
    run = retrieving.with_open_index(trainer(cb.Search(index=folder, k=2, turns=3)))
    environment = run.loss.environment
    assert isinstance(environment, FunctionTools) and environment.turns == 3
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": {"query": "number 3:"}}}
    (message,) = environment.begin({}).step([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert message["content"].count("documents.jsonl:") == 2
    with pytest.raises(UserError, match="the index gone is no folder"):
        retrieving.with_open_index(trainer(cb.Search(index="gone")))
    plain = trainer(None)
    assert retrieving.with_open_index(plain) is plain


def test_the_task_of_gin_retrieves(folder, model, tmp_path, capfd):  # noqa: F811
    (tmp_path / "qa.jsonl").write_text(json.dumps({"question": "number 3:", "answer": "river"}) + "\n")
    flags = [
        "--gin_file=evaluation/retrieved.gin",
        f"--gin.QUESTIONS=('{tmp_path / 'qa.jsonl'}',)",
        f"--gin.INDEX={folder}",
    ]
    flags += ["--gin.K=1", "--gin.retrieved/Sampling.max_new_tokens=2", f"--out={tmp_path / 'out.json'}"]
    flags += [f"--predictions={tmp_path / 'answers.jsonl'}"]
    assert run_verb(main, [f"--model_dir={model}", *flags]) == 0, capfd.readouterr().err
    result = json.loads((tmp_path / "out.json").read_text())["tasks"]["retrieved"]
    assert result["k"] == 1 and result["index"] == folder and "exact_match" in result["metrics"]
    prompts = [json.loads(line).get("prompt", "") for line in open(tmp_path / "answers.jsonl")]
    (prompt,) = filter(None, prompts)
    assert prompt.startswith("[1] ") and prompt.endswith("Question: number 3:\nAnswer:")
