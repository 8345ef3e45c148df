"""Fine-tuning in one call: methods, data, options and mistakes; test_three_doors.py has the same run by the command and by Gin."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pandas
import pyarrow
import pytest

import capibara as cb
from capibara import config
from capibara.api import data
from capibara.cli import finetune as verb
from capibara.cli import infer, plan, prepare
from capibara.cli import train as train_verb
from capibara.cli.composition import finetuning
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.monitoring.metrics_file.loggers import read_metrics
from capibara.multihost import exits


def losses(folder):
    return {record["step"]: record["loss"] for record in read_metrics(str(folder)) if record["kind"] == "train"}


def records(path):
    return [json.loads(line) for line in open(path)]


@pytest.mark.heavy
def test_a_result_has_its_views_and_the_command_line_resumes_it(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = records(f"{folder}/chats.jsonl")
    run = cb.finetune(f"{folder}/hf", rows, "python", steps=3, batch_size=8, length=64, log_every=1)
    assert (run.step, run.reason, run.checkpoints) == (3, "finished", [1, 2, 3])
    assert [row["step"] for row in run.history] == [0, 1, 2, 3]
    assert run.best_step == min((row["eval_loss"], row["step"]) for row in run.history)[1]
    assert list(run.frame().index) == [0, 1, 2, 3] and "eval_loss" in run.frame()
    run.plot().savefig("plot.png")
    with pytest.raises(cb.UserError, match="no step has a metric 'speed'"):
        run.plot("speed")
    model = run.model
    assert model.step == 3 and model.config.lora is None
    assert not np.array_equal(model.logits("river?"), cb.load(f"{folder}/hf").logits("river?"))
    assert model.save("mine.gguf") and cb.load("mine.gguf").chats
    beside = cb.load(cb.convert(run.folder, "adapter", format="peft"), base=f"{folder}/hf")
    np.testing.assert_allclose(beside.logits("river?"), model.logits("river?"), rtol=1e-4, atol=1e-5)
    again = ["--gin_file=python/config.gin", "--gin.Trainer.steps=4"]
    assert exits.run_verb(train_verb.main, again) == 0 and sorted(losses("python")) == [1, 2, 3, 4]


@pytest.mark.parametrize("method", ["full", pytest.param("qlora", marks=pytest.mark.heavy)])
def test_texts_are_trained_with_the_models_tokenizer(folder, tmp_path, method):
    texts = [record["text"] for record in records(f"{folder}/texts.jsonl")]
    run = cb.finetune(f"{folder}/hf", texts, str(tmp_path / "run"), method=method, steps=1, batch_size=8, length=32)
    assert run.step == 1 and type(run.model.tokenizer).__name__ == "TokenizerJsonVocabulary"


def test_pairs_and_prompts_have_their_losses(folder, tmp_path, capfd):
    pairs = cb.dpo(f"{folder}/hf", f"{folder}/pairs.jsonl", str(tmp_path / "dpo"), steps=1, batch_size=8, length=64)
    assert pairs.step == 1 and "reward_margin" in pairs.history[-1]

    alone = cb.orpo(f"{folder}/hf", f"{folder}/pairs.jsonl", str(tmp_path / "orpo"), steps=1, batch_size=8, length=64)
    assert alone.step == 1 and "log_odds_ratio" in alone.history[-1]
    short = cb.simpo(f"{folder}/hf", f"{folder}/pairs.jsonl", str(tmp_path / "simpo"), steps=1, batch_size=8, length=64)
    assert short.step == 1 and short.history[-1]["reward_margin"] != 0
    scores = cb.reward_model(
        f"{folder}/hf", f"{folder}/pairs.jsonl", str(tmp_path / "reward"), steps=1, batch_size=8, length=64
    )
    assert scores.step == 1 and "reward_accuracy" in scores.history[-1] and scores.model.logits("river?").shape[-1] == 1
    solutions = [{"prompt": f"{i}?", "steps": ["so", "no"], "labels": [True, False]} for i in range(30)]
    steps = cb.process_reward_model(
        f"{folder}/hf", solutions, str(tmp_path / "steps"), steps=1, batch_size=8, length=64
    )
    assert steps.step == 1 and "step_accuracy" in steps.history[-1]
    labelled = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in records(f"{folder}/pairs.jsonl")
        for side in ("chosen", "rejected")
    ]
    unpaired = cb.kto(f"{folder}/hf", labelled, str(tmp_path / "kto"), steps=1, batch_size=8, length=64)
    assert unpaired.step == 1 and {"kl", "reward_desirable"} <= unpaired.history[-1].keys()

    def near(prompt, answer, record):
        return -abs(len(answer) - int(record["answer"]))

    run = cb.grpo(
        f"{folder}/hf", f"{folder}/prompts.jsonl", str(tmp_path / "grpo"), [near],
        steps=1, batch_size=8, length=48, bindings=["GROUP = 4", "ANSWER_LENGTH = 8"],
    )  # fmt: skip
    assert run.step == 1 and "reward" in run.history[-1]
    assert "near is of this script" in capfd.readouterr().out


def test_a_teacher_is_another_model(folder, tmp_path):
    """Adapters learn from it; the run folder says which it was, and opens without it."""
    texts = [record["text"] for record in records(f"{folder}/texts.jsonl")]
    options = dict(steps=2, batch_size=8, length=32, log_every=1)
    teacher = cb.finetune(
        f"{folder}/hf", texts, str(tmp_path / "teacher"), method="full", learning_rate=1e-2, **options
    )
    more = {"bindings": ["Distillation.top_k = 8"], **options}
    run = cb.distill(f"{folder}/hf", teacher.folder, texts, str(tmp_path / "run"), **more)
    assert run.step == 2 and run.history[-1]["divergence"] > 0
    loss = cb.read_run(f"{run.folder}/config.gin").loss
    assert (
        loss.teacher.path == teacher.folder and loss.teacher.model == cb.read_run(f"{teacher.folder}/config.gin").model
    )
    assert run.model.generate("river?", max_new_tokens=2) is not None
    with pytest.raises(cb.UserError, match="teacher has no value, which method 'distill' learns from"):
        cb.finetune(f"{folder}/hf", texts, str(tmp_path / "none"), method="distill", **options)
    with pytest.raises(cb.UserError, match="set method = 'distill', or leave teacher out"):
        cb.finetune(f"{folder}/hf", texts, str(tmp_path / "none"), teacher=teacher.folder, **options)


def test_a_teacher_with_another_tokenizer_is_refused(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(f"{folder}/hf", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(cb.UserError, match="has another tokenizer than Dataset.vocabulary: 'a' is token "):
        cb.distill(f"{folder}/hf", str(other), ["a river"] * 9, str(tmp_path / "run"), steps=1, batch_size=8, length=32)


def test_a_stored_teacher_is_learned_from_without_it(folder, tmp_path, capfd):
    """`capibara prepare teacher` of the run that `finetune` prints, and the same run of what it stored."""
    data, out = f"{folder}/chats.jsonl", str(tmp_path / "stored")
    given = ["--gin_file=tasks/chat.gin", "--gin_file=runs/distill.gin", f"--gin.MODEL={folder}/hf", "--gin.LENGTH=64"]
    given += [f"--gin.FILES=('{data}',)", f"--gin.MODEL_DIR={tmp_path / 'run'}", "--gin.TRAIN_STEPS=2"]
    run = lambda *flags: exits.run_verb(prepare.main, ["teacher", *given, *flags])  # noqa: E731
    assert run(f"--gin.TEACHER={folder}/hf", "--top_k=5", f"--output={out}") == 0
    printed = capfd.readouterr().out
    assert f"positions of 5 tokens in {out}: train with --gin.Distillation.stored={out}" in printed
    assert exits.run_verb(train_verb.main, [*given, f"--gin.Distillation.stored={out}"]) == 0
    first = next(row for row in read_metrics(str(tmp_path / "run")) if row["kind"] == "eval")
    assert first["agreement"] > 0.99 and first["divergence"] < 1e-4  # the teacher has the student's weights
    for flags, error in (
        ([f"--gin.TEACHER={folder}/hf", f"--output={out}"], "exists: name a new folder"),
        ([f"--gin.TEACHER={folder}/hf"], "--output is missing"),
        ([f"--gin.TEACHER={tmp_path}/nowhere", f"--output={out}2"], "nowhere"),
        ([f"--gin.Distillation.stored={out}", f"--output={out}2"], "top_k is 64, and Distillation.stored has"),
    ):
        assert run(*flags) == exits.EXIT_USER_ERROR
        assert error in capfd.readouterr().err


def closeness(prompt, answer, record):
    return -abs(len(answer) - int(record["answer"]))


def test_a_process_reward_model_scores_each_step(folder, tmp_path):
    """A step's score is the logit at the end of its separator, with what stands before it alone."""
    solutions = [{"prompt": f"{i}?", "steps": ["so", "no"], "labels": [True, False]} for i in range(30)]
    model = cb.process_reward_model(f"{folder}/hf", solutions, str(tmp_path), steps=1, batch_size=8, length=64).model
    begin = model._chat.template.render(
        Conversation([{"role": "user", "content": "1?"}]), "", add_generation_prompt=True
    )

    def score(text):
        return float(model.logits(model.tokenizer.encode_rendered(begin.text + text)[0])[-1, 0])

    first, second = model.scores("1?", ["so\n\nno", "no"])
    assert first == pytest.approx([score("so\n"), score("so\nno\n")], rel=1e-4, abs=1e-6)
    assert second == pytest.approx([score("no\n")], rel=1e-4, abs=1e-6) and len({*first, *second}) == 3


def length_of(method):
    """Of online DPO a row has two answers."""
    return 96 if method == "online_dpo" else 48


@pytest.mark.parametrize(("method", "rows", "answer"), [("grpo", 64, 64), ("online_dpo", 32, 32), ("dpo", 8, None)])
def test_rows_and_answers_are_as_the_method_has_them(folder, tmp_path, method, rows, answer):
    name = "pairs" if method == "dpo" else "prompts"
    asked = dict(model=f"{folder}/hf", files=(f"{folder}/{name}.jsonl",), out=str(tmp_path), length=96, steps=1)
    bindings = finetuning.choose(finetuning.FineTuning(**asked, method=finetuning.Method(method))).bindings
    assert f"BATCH_SIZE = {rows}" in bindings
    assert [line for line in bindings if line.startswith("ANSWER_LENGTH")] == [f"ANSWER_LENGTH = {answer}"] * bool(
        answer
    )


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("method", "bindings", "metric"),
    [
        ("dapo", ["GROUP = 4", "OVERLONG = 4", "RESAMPLE = 1"], "overlong_penalty"),
        ("reinforce_pp", [], "kl_coefficient"),
        ("ppo", ["MINI_BATCHES = 1"], "value_loss"),
        ("online_dpo", ["Dpo.kind = 'ipo'"], "reward_margin"),
    ],
)
def test_each_method_with_rewards_trains_adapters(folder, tmp_path, method, bindings, metric):
    """From a folder of transformers, which has no value head."""
    run = cb.grpo(
        f"{folder}/hf", f"{folder}/prompts.jsonl", str(tmp_path / "run"), [closeness], method=method, steps=2,
        batch_size=8, length=length_of(method), bindings=["ANSWER_LENGTH = 8", *bindings],
    )  # fmt: skip
    assert run.step == 2 and any(metric in record for record in run.history)
    assert run.model.generate("river?", max_new_tokens=2) is not None


def test_verifiers_are_rewards(folder, tmp_path):
    """Also of the run that the command line resumes."""
    prompts = [{"prompt": f"{n}?", "schema": {"type": "integer"}} for n in range(8)]
    rewards = [cb.JsonAnswer(), cb.PassesTests(field="schema", limits=cb.Sandbox(seconds=2.0))]
    with pytest.raises(cb.UserError, match="the target's 'test' must be a text"):
        cb.grpo(f"{folder}/hf", prompts, str(tmp_path / "no"), rewards, steps=1, batch_size=8, length=48)
    run = cb.grpo(
        f"{folder}/hf", prompts, str(tmp_path / "run"), rewards[:1], steps=1, batch_size=8, length=48, log_every=1,
        bindings=["ANSWER_LENGTH = 4"],
    )  # fmt: skip
    assert any("reward" in record for record in run.history)
    assert cb.read_run(f"{run.folder}/config.gin").loss.rewards == (cb.JsonAnswer(),)


@pytest.mark.parametrize(
    ("method", "steps"),
    [("grpo", 3), *(pytest.param(*case, marks=pytest.mark.heavy) for case in (("online_dpo", 3), ("ppo", 12)))],
)
def test_adapters_are_trained_beside_the_devices_that_draw(folder, tmp_path, method, steps):
    """Runs of PPO have eight steps to a rollout."""
    run = cb.grpo(
        f"{folder}/hf", f"{folder}/prompts.jsonl", str(tmp_path / "run"), [closeness], method=method, steps=steps,
        batch_size=16, length=length_of(method), rollout_devices=4, max_staleness=8, log_every=1, bindings=["ANSWER_LENGTH = 8"],
    )  # fmt: skip
    assert run.step == steps and max(record.get("staleness", 0) for record in run.history) > 0
    loss = cb.read_run(f"{run.folder}/config.gin").loss
    assert (loss.rollout_devices, loss.max_staleness) == (4, 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"methd": "dpo"}, "no option 'methd': did you mean method?"),
        ({"method": "dopo"}, "method is 'dopo', must be one of lora"),
        ({"data": []}, "the data is empty"),
        ({"data": [1]}, "record 0 of the data is 1, must be a dict or a text"),
        ({"data": [{"text": object()}]}, "record 0 of the data cannot be written as JSON"),
        ({"data": {"text": "a"}}, "the data is a dict"),
        ({"data": "nothing.jsonl"}, "'nothing.jsonl'"),
        ({"method": "dpo"}, "method 'dpo' reads lines with 'chosen' and 'rejected'"),
        ({"data": [{"prompt": "a", "chosen": "b", "rejected": "c"}]}, "set method = 'dpo'"),
        ({"data": [{"prompt": "a", "completion": "b", "label": True}]}, "answers with labels: set method = 'kto'"),
        (
            {"data": [{"prompt": "a", "completion": "b", "label": True}], "method": "simpo"},
            "method 'simpo' reads lines with 'chosen' and 'rejected', and the first one has prompt, completion, label: set",
        ),
        (
            {"data": [{"prompt": "a", "chosen": "b", "rejected": "c"}], "method": "kto"},
            "method 'kto' reads lines with a 'label', true or false, and the first one has prompt, chosen, rejected: set",
        ),
        ({"steps": 1, "epochs": 1}, "exclude each other"),
        ({"steps": 0}, "steps (0) must be at least 1"),
        (
            {"rewards": [cb.exact_answer], "steps": 1},
            "'reinforce_pp', 'ppo', 'online_dpo', and method is 'lora': set one, or leave them out",
        ),
        ({"rewards": cb.exact_answer, "method": "grpo", "steps": 1}, "must be a list of functions"),
        (
            {"method": "grpo", "steps": 1, "rewards": [lambda prompt, answer, record: 1.0]},
            "must be a function with a name",
        ),
        ({"method": None}, "method is None"),
        ({"steps": "10"}, "steps"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"lr": 1e-4}, "no option 'lr': did you mean learning_rate?"),
        ({"model_dir": "x"}, "no option 'model_dir'"),
        ({"bindings": ["TRAIN_STEPS = 3"]}, "is an option of its own: set steps in its place"),
        ({"bindings": ["MODEL = 'x'"]}, "set model in its place"),
        ({"method": "full", "lora": cb.Lora(), "steps": 1}, "lora is of adapters, and method is 'full'"),
        ({"lora": True}, "lora is True, must be a rank or capibara.Lora(...)"),
        ({"lora": 0, "steps": 1}, "Lora.rank is 0, must be at least 1"),
        ({"method": "full", "lora": 4, "steps": 1}, "lora is of adapters, and method is 'full'"),
        ({"data": ["half \ud83d"]}, "lone surrogate"),
        ({"data": {"a", "b"}}, "the data is a set"),
        ({"length": 4096, "steps": 1}, "4096"),
        ({"learning_rate": -1.0, "steps": 1}, "Schedule.learning_rate"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_run(folder, tmp_path, change, said):
    options = {"data": f"{folder}/chats.jsonl"} | change
    with pytest.raises(cb.UserError) as caught:
        cb.finetune(f"{folder}/hf", options.pop("data"), str(tmp_path / "run"), **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "config.gin").exists()


def test_a_folder_that_is_no_new_run_is_left_alone(folder, tmp_path, capfd):
    (tmp_path / "file").write_text("precious")
    for out, said in (
        ("", "out is ''"),
        (str(tmp_path / "file"), "is a file"),
        (f"{folder}/hf", "is the folder of the model"),
    ):
        with pytest.raises(cb.UserError, match=said):
            cb.finetune(f"{folder}/hf", ["a b"], out, steps=1)
    assert (tmp_path / "file").read_text() == "precious" and not os.path.exists(f"{folder}/hf/data")
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}')
    flags = [f"--model={folder}/hf", f"--data={tmp_path}/a.jsonl", f"--out={folder}/hf/../hf", "--steps=1"]
    assert exits.run_verb(verb.main, flags) == 2 and "is the folder of the model" in capfd.readouterr().err


def test_the_methods_bits_are_those_of_its_name(folder, tmp_path, monkeypatch):
    """Given adapters change the adapters, not what is trained."""
    from capibara.cli.composition import training_run

    seen = []
    monkeypatch.setattr(training_run, "train", lambda trainer, *others, **options: seen.append(trainer) or _Outcome())
    options = {"steps": 1, "length": 32, "lora": cb.Lora(rank=4)}
    for method in ("lora", "qlora"):
        cb.finetune(f"{folder}/hf", ["a b"], str(tmp_path / method), method=method, **options)
    assert [(one.model.lora.rank, str(one.model.lora.base_dtype)) for one in seen] == [(4, "float32"), (4, "nf4")]


def test_a_rank_changes_the_adapters_of_the_method(folder, tmp_path, monkeypatch):
    from capibara.cli.composition import training_run

    seen = []
    monkeypatch.setattr(training_run, "train", lambda trainer, *others, **options: seen.append(trainer) or _Outcome())
    for name, lora in (("usual", None), ("rank", 4)):
        cb.finetune(f"{folder}/hf", ["a b"], str(tmp_path / name), method="qlora", lora=lora, steps=1, length=32)
    usual, ranked = (one.model.lora for one in seen)
    assert usual.targets == ("all-linear",) and str(usual.base_dtype) == "nf4"
    assert ranked == dataclasses.replace(usual, rank=4, alpha=8.0)


class _Outcome:
    step, reason, signal_number = 1, "finished", None


@pytest.mark.parametrize("flags", [["--emulate=2"], pytest.param(["launch"], marks=pytest.mark.heavy)])
def test_jax_is_not_started_before_its_devices_are_known(folder, tmp_path, flags):
    """Emulated devices, and processes that join, come before everything that asks JAX."""
    run = [f"--gin.MODEL={folder}/hf", f"--gin.MODEL_DIR={tmp_path}/run", f"--gin.FILES=('{folder}/chats.jsonl',)"]
    run += [
        "--gin_file=tasks/chat.gin",
        "--gin_file=runs/lora.gin",
        "--gin.TRAIN_STEPS=1",
        "--gin.LENGTH=64",
        "--gin.BATCH_SIZE=8",
    ]
    commands = [["-m", "capibara.train", *run, *flags, "--check"]]
    asked = [f"--model={folder}/hf", f"--data={folder}/chats.jsonl", f"--out={tmp_path}/tuned", "--length=64"]
    commands += [["-m", "capibara.finetune", *asked, *flags, "--check"]]
    if flags == ["launch"]:
        commands = [["-m", "capibara.launch", "local", "--processes=2", "--", "train", *run]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_FLAGS", "JAX_NUM"))}
    for command in commands:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert flags == ["launch"] or "2 x cpu" in done.stdout or "checked mesh: fsdp=2" in done.stdout, done.stdout


def test_a_reward_has_a_name(folder, tmp_path):
    with pytest.raises(cb.UserError, match="must be a function with a name"):
        cb.grpo(
            f"{folder}/hf", f"{folder}/prompts.jsonl", str(tmp_path / "r"), [lambda p, a, r: 1.0], steps=1, length=96
        )

    def Trainer(prompt, answer, record):  # noqa: N802
        return 1.0

    with pytest.raises(cb.UserError, match="has the name of Trainer of capibara"):
        cb.grpo(f"{folder}/hf", f"{folder}/prompts.jsonl", str(tmp_path / "r"), [Trainer], steps=1, length=96)
    with pytest.raises(cb.UserError, match="rewards is empty"):
        cb.grpo(f"{folder}/hf", f"{folder}/prompts.jsonl", str(tmp_path / "r"), [], steps=1)


def test_a_pass_over_the_data_is_counted(folder, tmp_path):
    from capibara.cli.composition import finetuning

    asked = finetuning.FineTuning(
        model=f"{folder}/hf",
        files=(f"{folder}/texts.jsonl",),
        out=str(tmp_path / "run"),
        batch_size=8,
        length=32,
        epochs=3,
    )
    chosen = finetuning.choose(asked)
    (steps,) = [line for line in chosen.bindings if line.startswith("TRAIN_STEPS")]
    count = int(steps.partition("=")[2])
    assert count % 3 == 0 and chosen.notes == (f"{count} steps: 3 x {count // 3} batches of the data",)
    texts = [record["text"] for record in records(f"{folder}/texts.jsonl")]
    tokens = sum(len(cb.load(f"{folder}/hf").tokenizer.encode(text)) + 1 for text in texts)
    assert tokens / (8 * 32) * 0.9 <= count // 3 <= tokens / (8 * 32) * 1.3 + 1


def test_what_was_named_is_what_is_trained(folder, tmp_path, monkeypatch):
    from capibara.cli.composition import training_run

    seen = []
    monkeypatch.setattr(training_run, "train", lambda trainer, *others, **options: seen.append(trainer) or _Outcome())
    chats, texts = f"{folder}/chats.jsonl", f"{folder}/texts.jsonl"
    named = {"steps": 7, "learning_rate": 0.5, "batch_size": 4, "length": 32, "seed": 3}
    cb.finetune(f"{folder}/hf", texts, str(tmp_path / "run"), eval=["river"], **named)
    (run,) = seen
    assert (run.steps, run.optimizer.schedule.learning_rate, run.plan.batch_size) == (7, 0.5, 4)
    assert (run.dataset.length, run.seed, run.dataset.seed) == (32, 3, 3) and run.dataset.source.files == (texts,)
    (held_out,) = run.dataset.source.validation_files
    assert records(held_out) == [{"text": "river"}]
    cb.finetune(f"{folder}/hf", chats, str(tmp_path / "run"), steps=7)
    run = seen[-1]
    assert not run.dataset.source.validation_files and run.dataset.source.validation_fraction == 0.03


@pytest.mark.parametrize(
    ("method", "billions", "wanted"),
    [
        ("lora", 1, 2e-4),
        ("qlora", 20, 1e-4),
        ("full", 1, 2e-5),
        ("full", 20, 1e-5),
        ("dpo", 1, 1e-4),
        ("kto", 1, 1e-4),
        ("simpo", 1, 2e-5),
        ("grpo", 1, 2e-5),
    ],
)
def test_the_learning_rate_is_by_method_and_size(method, billions, wanted):
    from capibara.cli.composition import finetuning, pretrained

    model = cb.DecoderConfig(vocab_size=256, embed_dim=4096, num_layers=billions, num_heads=32, mlp_dim=81920)
    found = pretrained.Pretrained("x", model, cb.ByteVocabulary())
    assert finetuning.learning_rate(finetuning.Method(method), found) == wanted


# --- data --------------------------------------------------------------------------------------------------------------

ROWS = [{"text": "river"}, {"text": "sun"}]


@pytest.mark.parametrize(
    "given",
    [
        ROWS,
        (row for row in ROWS),
        ["river", "sun"],
        pandas.DataFrame(ROWS),
        pyarrow.Table.from_pylist([ROWS[0] | {"more": None}, ROWS[1]]),
    ],
    ids=["dicts", "generator", "texts", "pandas", "arrow"],
)
def test_every_kind_of_data_is_the_same_file(given, tmp_path):
    (path,) = cb.write_data(given, str(tmp_path / "folder"))
    assert records(path) == ROWS and os.path.basename(path).startswith("data-")


def test_records_are_written_on_this_machine_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match="the data cannot be written into gs://bucket/run/data: name a run folder on this"
    ):
        cb.write_data(ROWS, "gs://bucket/run/data")
    assert not os.listdir()


def test_values_of_numpy_and_missing_ones_of_pandas_are_written(tmp_path):
    frame = pandas.DataFrame(
        {"text": ["a", "b"], "score": [1.5, None], "when": pandas.to_datetime(["2026-01-02", None])}
    )
    assert records(*cb.write_data(frame, str(tmp_path))) == [
        {"text": "a", "score": 1.5, "when": "2026-01-02T00:00:00"},
        {"text": "b"},
    ]
    assert records(*cb.write_data([{"text": "a", "n": np.int64(3)}], str(tmp_path))) == [{"text": "a", "n": 3}]


def test_paths_stay_paths(folder, tmp_path):
    assert cb.write_data(f"{folder}/chats.jsonl", str(tmp_path)) == (f"{folder}/chats.jsonl",)
    both = [f"{folder}/chats.jsonl", f"{folder}/texts.jsonl"]
    assert cb.write_data(both, str(tmp_path)) == tuple(both) and not [*tmp_path.iterdir()]


# --- MODEL in Gin ------------------------------------------------------------------------------------------------------


def test_a_mapping_of_splits_is_training_and_validation_data():
    """As a datasets.DatasetDict is."""
    of = {"test_sft": [{"text": "c"}], "train_sft": [{"text": "a"}], "validation_sft": [{"text": "b"}]}
    assert data.by_splits(of, None) == ([{"text": "a"}], [{"text": "b"}])
    assert data.by_splits(of, [{"text": "d"}]) == ([{"text": "a"}], [{"text": "d"}])
    record = {"prompt": "train", "completion": "b"}
    assert data.by_splits(record, None) == (record, None)
    with pytest.raises(
        UserError, match="the data has the splits train, train_gen: give one, such as data\\['train'\\]"
    ):
        data.by_splits({"train": [], "train_gen": []}, None)
    several = {"train": [], "val": [], "dev": []}
    with pytest.raises(UserError, match="the splits train, val, dev: give one as eval, such as data\\['val'\\]"):
        data.by_splits(several, None)
    assert data.by_splits(several, [1]) == ([], [1])
    with pytest.raises(UserError, match="the data has the splits test: give one, such as data\\['test'\\]"):
        data.by_splits({"test": []}, None)


def test_a_split_that_is_not_read_is_named(caplog):
    of = {"train": [{"text": "a"}], "test": [{"text": "c"}]}
    assert data.by_splits(of, None) == ([{"text": "a"}], None)
    assert "train is read for training, and not test: give one as eval, such as eval=data['test']" in caplog.text
    caplog.clear()
    data.by_splits(of, [{"text": "d"}])
    data.by_splits(of | {"validation": [{"text": "b"}]}, None)
    assert not caplog.text


def test_a_gin_file_names_a_model_in_place_of_its_sizes(folder, tmp_path, capfd):
    text = f"""
include "tasks/chat.gin"
include "runs/full.gin"
MODEL = "{folder}/m.gguf"
MODEL_DIR = "{tmp_path}/run"
FILES = ("{folder}/chats.jsonl",)
TRAIN_STEPS = 1
BATCH_SIZE = 8
LENGTH = 64
"""
    (tmp_path / "run.gin").write_text(text)
    assert exits.run_verb(train_verb.main, [f"--gin_file={tmp_path}/run.gin", "--check"]) == 0, capfd.readouterr().err
    assert exits.run_verb(train_verb.main, [f"--gin_file={tmp_path}/run.gin", "--gin.MODEL=/nowhere/x", "--check"]) == 2
    assert "/nowhere/x does not exist" in capfd.readouterr().err
    assert exits.run_verb(train_verb.main, [f"--gin_file={tmp_path}/run.gin", "--gin.MODEL=''", "--check"]) == 2
    assert "MODEL is empty" in capfd.readouterr().err
    assert exits.run_verb(plan.main, [f"--gin_file={tmp_path}/run.gin", "--slice=v5e-4"]) == 0
    (tmp_path / "qa.jsonl").write_text('{"prompt": "a", "target": "b"}')
    assert exits.run_verb(infer.main, [f"--model={folder}/hf", f"--gin.MODEL={folder}/hf", "--prompt=a"]) == 2
    assert "names a model, which train, finetune, plan and prove read" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["INIT_FROM", "TOKENIZER"])
def test_what_is_given_beside_a_model_is_not_the_models(folder, name):
    from capibara.cli.composition import pretrained

    bindings = [f"MODEL = '{folder}/m.gguf'", "MODEL_DIR = 'x'", "FILES = ('x',)", "TRAIN_STEPS = 1", "BATCH_SIZE = 8"]
    pretrained.parse(["tasks/chat.gin", "runs/full.gin"], [*bindings, f"{name} = '{folder}/hf'"], ())
    values = {one: config.macro(one) for one in ("INIT_FROM", "TOKENIZER")}
    assert values.pop(name) == f"{folder}/hf" and f"{folder}/hf" not in values.values()
