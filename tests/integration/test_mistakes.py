"""Mistakes of a user: each is one line with exit code 2, told before the train step is compiled, and soon.

A case names its arguments after those of a run that is in order, and words of the line. `make` writes what the case needs
into the folder; a case with `resumes` starts on a copy of a run that has trained 6 steps.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from safetensors.numpy import save_file

from capibara.training import setup

from .conftest import run_here

TRAIN = ("train", "--gin_file=tiny.gin", "--emulate=8")
CHAT = "--gin_file=tasks/chat.gin"
LIMIT_S = 3.0


@dataclasses.dataclass(frozen=True)
class Mistake:
    name: str
    args: tuple[str, ...]
    words: tuple[str, ...]
    make: Callable[[pathlib.Path], None] | None = None
    resumes: bool = False
    missing: str | None = None  # a module that is not installed


def lines(name: str, *records: object) -> Callable[[pathlib.Path], None]:
    """Writes JSON lines; a text is written as it is."""

    def make(folder: pathlib.Path) -> None:
        texts = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (folder / name).write_text("".join(f"{text}\n" for text in texts))

    return make


def chat(name: str, content: str) -> Callable[[pathlib.Path], None]:
    messages = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": content}]
    return lines(name, *[{"messages": messages}] * 12)


def tokenizer(folder: pathlib.Path, template: str | None) -> None:
    """A tokenizer of single bytes, with a chat template or without."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*letters, "<|im_start|>", "<|im_end|>"])}
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    values = {"eos_token": "<|im_end|>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def flipped(folder: pathlib.Path, name: str) -> None:
    """Flips a bit in every file of a name under the checkpoints."""
    paths = [path for path in (folder / "run/checkpoints/6").rglob(name) if path.is_file()]
    assert paths, name
    for path in paths:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def chat_of(tokens: str, files: str, *more: str) -> tuple[str, ...]:
    return (CHAT, f"--gin.TOKENIZER={tokens}", f"--gin.FILES=('{files}',)", *more)


def with_tokenizer(template: str | None, make: Callable[[pathlib.Path], None]) -> Callable[[pathlib.Path], None]:
    def both(folder: pathlib.Path) -> None:
        tokenizer(folder / "tokens", template)
        make(folder)

    return both


def gpt2(folder: pathlib.Path) -> None:
    """A folder of transformers, of another architecture than the run's."""
    (folder / "gpt2").mkdir(exist_ok=True)
    values = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 384, "n_positions": 64}
    (folder / "gpt2" / "config.json").write_text(json.dumps(values | {"n_embd": 32, "n_layer": 2, "n_head": 2}))
    save_file({"transformer.wte.weight": np.zeros((384, 32), np.float32)}, folder / "gpt2" / "model.safetensors")


DATA = (
    Mistake("files-match-nothing", ("--gin.FILES=('none-*.jsonl',)",), ("JsonlSource.files", "none-*.jsonl", "matches no")),
    Mistake("a-key-that-no-line-has", ("--gin.TEXT_FIELD=content",), ("corpus.jsonl:1", "no field 'content'")),
    Mistake("broken-json", ("--gin.FILES=('bad.jsonl',)",), ("bad.jsonl:3 is not JSON",), lines("bad.jsonl", {"text": "a"}, {"text": "b"}, "{text: c}", {"text": "d"})),
    Mistake("a-number-as-text", ("--gin.FILES=('numbers.jsonl',)",), ("numbers.jsonl:1", "text"), lines("numbers.jsonl", *[{"text": 5}] * 9)),
    Mistake("an-empty-file", ("--gin.FILES=('empty.jsonl',)",), ("empty.jsonl", "the corpus is empty"), lines("empty.jsonl")),
    Mistake("blank-lines", ("--gin.FILES=('blank.jsonl',)",), ("blank.jsonl", "the corpus is empty"), lines("blank.jsonl", "", "", "")),
    Mistake("texts-that-are-empty", ("--gin.FILES=('void.jsonl',)", "--gin.Dataset.append_eos=False"), ("no text",), lines("void.jsonl", *[{"text": ""}] * 9)),
    Mistake("rows-that-are-all-too-long", chat_of("tokens", "long.jsonl"), ("longer than Dataset.length (64)", "Dataset.length to 344"), with_tokenizer(CHATML, chat("long.jsonl", "because " * 40))),
    Mistake("no-chat-template", chat_of("tokens", "chats.jsonl"), ("template",), with_tokenizer(None, chat("chats.jsonl", "so"))),
    Mistake("a-chat-template-with-a-fault", chat_of("tokens", "chats.jsonl"), ("template",), with_tokenizer("{% for m in %}", chat("chats.jsonl", "so"))),
    Mistake("chats-without-messages", chat_of("tokens", "corpus.jsonl"), ("corpus.jsonl:1", "messages"), with_tokenizer(CHATML, chat("chats.jsonl", "so"))),
    Mistake("a-tokenizer-that-is-not-there", ("--gin.Dataset.vocabulary=@TokenizerJsonVocabulary()", "--gin.TokenizerJsonVocabulary.path=nowhere"), ("nowhere", "TokenizerJsonVocabulary.path")),
    Mistake("a-vocabulary-larger-than-the-model", ("--gin.DecoderConfig.vocab_size=256",), ("DecoderConfig.vocab_size (256)", "vocabulary's size (384)", "try 384")),
    Mistake("validation-files-that-are-not-there", ("--gin.VALIDATION_FILES=('held_out.jsonl',)", "--gin.Evaluation.every=3"), ("JsonlSource.validation_files", "held_out.jsonl", "matches no")),
    Mistake("validation-lines-without-the-key", ("--gin.VALIDATION_FILES=('other.jsonl',)", "--gin.Evaluation.every=3"), ("other.jsonl:1", "no field 'text'"), lines("other.jsonl", *[{"body": "a"}] * 9)),
    Mistake("one-document-of-which-none-can-be-held-out", ("--gin.FILES=('one.jsonl',)",), ("1 document", "validation_files"), lines("one.jsonl", {"text": "a"})),
    Mistake("held-out-rows-that-are-all-too-long", chat_of("tokens", "short.jsonl", "--gin.VALIDATION_FILES=('long.jsonl',)", "--gin.Evaluation.every=3"), ("longer than Dataset.length (64)", "Dataset.length to 344"), lambda folder: [with_tokenizer(CHATML, chat("long.jsonl", "because " * 40))(folder), chat("short.jsonl", "so")(folder)]),
    Mistake("a-line-that-is-no-object", ("--gin.FILES=('list.jsonl',)",), ("list.jsonl:1",), lines("list.jsonl", *["[1, 2]"] * 9)),
    Mistake("a-null-as-text", ("--gin.FILES=('null.jsonl',)",), ("null.jsonl", "all 9 texts are null", "another field than text"), lines("null.jsonl", *[{"text": None}] * 9)),
    Mistake("a-table-that-is-not-there", ("--gin_file=tasks/huggingface.gin", "--gin.DATASET_PATH=./nowhere", "--gin.FILES=('x',)", "--gin.VALIDATION_FILES=()"), ("HuggingFaceSource.path ('./nowhere')",), lambda folder: importlib.import_module("datasets")),
    Mistake("datasets-that-is-not-installed", ("--gin.Dataset.source=@HuggingFaceSource()", "--gin.HuggingFaceSource.path=x"), ("datasets is not installed", '[hf]"'), missing="datasets"),
    Mistake("seqio-that-is-not-installed", ("--gin.Dataset.source=None", "--gin.Dataset.mixture_or_task_name=python_stdlib"), ("seqio is not installed (needed for SeqIO tasks)", '[seqio]"'), missing="seqio"),
    Mistake("rows-longer-than-the-model", ("--gin.DecoderConfig.max_length=32",), ("Dataset.length (64)", "max_length (32)")),
)  # fmt: skip

FOLDERS = (
    Mistake("model-dir-is-a-file", ("--gin.MODEL_DIR=corpus.jsonl",), ("corpus.jsonl", "MODEL_DIR")),
    Mistake("model-dir-in-a-file", ("--gin.MODEL_DIR=corpus.jsonl/run",), ("corpus.jsonl", "MODEL_DIR")),
    Mistake("model-dir-cannot-be-written", ("--gin.MODEL_DIR=/proc/none/run",), ("/proc/none", "cannot be written", "MODEL_DIR")),
    Mistake("model-dir-with-a-nul", ("--gin.MODEL_DIR='a\\x00b'",), ("Trainer.model_dir", "NUL character, take it out")),
    Mistake("init-from-is-not-there", ("--gin.Trainer.init_from=nowhere",), ("Trainer.init_from", "'nowhere'")),
    Mistake("init-from-and-the-tokenizer-in-it-are-not-there", chat_of("%INIT_FROM", "chats.jsonl", "--gin.INIT_FROM='nowhere'", "--gin.Trainer.init_from=%INIT_FROM"), ("Trainer.init_from", "'nowhere'"), chat("chats.jsonl", "so")),
    Mistake("init-from-is-an-empty-folder", ("--gin.Trainer.init_from=hollow",), ("Trainer.init_from", "hollow"), lambda folder: (folder / "hollow").mkdir(exist_ok=True)),
    Mistake("init-from-has-other-sizes", ("--gin.Trainer.init_from=done", "--gin.DecoderConfig.mlp_dim=96"), ("Trainer.init_from", "params/layers/mlp", "float32[2,")),
    Mistake("init-from-is-another-architecture", ("--gin.Trainer.init_from=gpt2",), ("gpt2", "DecoderConfig"), gpt2),
    Mistake("other-sizes-on-resume", ("--gin.TRAIN_STEPS=9", "--gin.DecoderConfig.mlp_dim=96"), ("another model", "params/layers/mlp", "float32[2,", "MODEL_DIR"), resumes=True),
    Mistake("another-optimizer-on-resume", ("--gin.TRAIN_STEPS=9", "--gin.Optimizer.name=lion"), ("another optimizer's state",), resumes=True),
    Mistake("other-rows-on-resume", ("--gin.TRAIN_STEPS=9", "--gin.LENGTH=32"), ("length was 64, is 32",), resumes=True),
    Mistake("other-files-on-resume", ("--gin.TRAIN_STEPS=9", "--gin.FILES=('more.jsonl',)"), ("data",), lines("more.jsonl", *[{"text": "abc"}] * 20), resumes=True),
    Mistake("a-finished-run", (), ("step 6 of 6", "TRAIN_STEPS"), resumes=True),
    Mistake("fewer-steps-than-the-run-has", ("--gin.TRAIN_STEPS=5",), ("step 6 of 5", "TRAIN_STEPS"), resumes=True),
    Mistake("a-resume-state-that-is-corrupt", ("--gin.TRAIN_STEPS=9",), ("no step that is what was saved", "run.json"), lambda folder: flipped(folder, "run.json"), resumes=True),
    Mistake("arrays-that-are-corrupt", ("--gin.TRAIN_STEPS=9",), ("no step that is what was saved",), lambda folder: flipped(folder, "*"), resumes=True),
    Mistake("a-key-that-is-not-given", ("--gin.Checkpointing.encryption=@Encryption()",), ("CAPIBARA_CHECKPOINT_KEY",)),
    Mistake("an-average-that-the-checkpoints-lack", ("--gin.TRAIN_STEPS=9", "--gin.Trainer.ema_decay=0.9"), ("another ema_decay's state",), resumes=True),
    Mistake("initial-weights-with-adapters-that-are-not-there", ("--gin.Trainer.init_from=done", "--gin.Trainer.init_with=adapters", "--gin.DecoderConfig.lora=@Lora()"), ("Trainer.init_with is 'adapters'", "('done') has none", "set 'weights'")),
    Mistake("a-state-that-goes-on-and-has-ended", ("--gin.Trainer.init_from=done", "--gin.Trainer.init_with=state"), ("Trainer.steps (6) must be above the step of Trainer.init_from (6)",)),
    Mistake("a-state-of-another-optimizer", ("--gin.Trainer.init_from=done", "--gin.Trainer.init_with=state", "--gin.TRAIN_STEPS=9", "--gin.Optimizer.name=lion"), ("Trainer.init_from", "another optimizer's state")),
    Mistake("checkpoints-that-are-gone", ("--gin.TRAIN_STEPS=9",), ("checkpoints", "--start_over"), lambda folder: shutil.rmtree(folder / "run/checkpoints/6"), resumes=True),
)  # fmt: skip

NAMES = (
    Mistake("a-class-that-is-misspelt", ("--gin.Trainr.steps=3",), ("did you mean Trainer?",)),
    Mistake("a-parameter-that-is-misspelt", ("--gin.Trainer.step=3",), ("Trainer has no parameter step", "did you mean steps?")),
    Mistake("a-macro-that-is-misspelt", ("--gin.TRAIN_STEP=3",), ("TRAIN_STEP", "did you mean TRAIN_STEPS?")),
    Mistake("a-macro-of-itself", ("--gin.A=%A", "--gin.TRAIN_STEPS=%A"), ("macros lead back to themselves", "%A")),
    Mistake("a-reference-that-is-misspelt", ("--gin.Trainer.optimizer=@Optimiser()",), ("@Optimiser", "did you mean Optimizer?")),
    Mistake("a-flag-that-is-misspelt", ("--emulat=8",), ("unknown flag --emulat", "--emulate")),
    Mistake("a-gin-file-that-is-not-there", ("--gin_file=tinny.gin",), ("tinny.gin", "tiny.gin")),
    Mistake("a-word-for-a-number", ("--gin.TRAIN_STEPS=many",), ("Trainer.steps", "many", "TRAIN_STEPS")),
    Mistake("a-choice-that-is-none", ("--gin.Optimizer.name=adam",), ("Optimizer.name", "'adam'", "adamw")),
    Mistake("a-value-that-is-required", ("--gin.MODEL_DIR=%gin.REQUIRED",), ("Trainer.model_dir has no value", "--gin.MODEL_DIR=")),
    Mistake("a-parameter-of-another-class", ("--gin.Optimizer.learning_rate=1e-3",), ("Optimizer has no parameter learning_rate", "Schedule.learning_rate")),
    Mistake("rows-that-do-not-divide-over-the-mesh", ("--gin.BATCH_SIZE=12",), ("Plan.batch_size (12) must be a multiple of 8", "try 16")),
    Mistake("rows-of-an-evaluation-that-do-not-divide", ("--gin.Evaluation.batch_size=12", "--gin.Evaluation.every=2"), ("Evaluation.batch_size (12) must be a multiple of 8", "try 16")),
    Mistake("a-mesh-larger-than-the-devices", ("--gin.Plan.tensor=16",), ("tensor=16", "8 devices")),
    Mistake("a-mesh-that-does-not-divide", ("--gin.Plan.tensor=3",), ("tensor=3", "must divide the 8 devices", "try 2")),
    Mistake("a-context-axis-that-does-not-divide-the-rows", ("--gin.Plan.context=4", "--gin.LENGTH=60"), ("Dataset.length (60) must be a multiple of 8", "try 64")),
    Mistake("heads-that-do-not-divide", ("--gin.DecoderConfig.num_heads=3", "--gin.DecoderConfig.head_dim=8", "--gin.Plan.tensor=2"), ("(3)", "tensor=2")),
    Mistake("a-learning-rate-that-is-too-high", ("--gin.LEARNING_RATE=100",), ("Schedule.learning_rate is 100", "at most 10")),
    Mistake("a-warmup-longer-than-the-run", ("--gin.Schedule.warmup_steps=50",), ("Schedule.warmup_steps (50)", "6 steps")),
    Mistake("an-adapter-of-nothing", ("--gin.DecoderConfig.lora=@Lora()", "--gin.Lora.targets=('q_prj',)"), ("Lora.targets", "'q_prj'")),
    Mistake("milestones-that-are-never-saved", ("--gin.Checkpointing.milestones=(4,)",), ("Checkpointing.milestones", "4", "Checkpointing.every")),
    Mistake("patience-without-evaluations", ("--gin.Evaluation.patience=3",), ("Evaluation.patience", "3", "Evaluation.every")),
    Mistake("samples-without-evaluations", ("--gin.SampleText.prompts=('river',)",), ("SampleText.prompts", "Evaluation.every")),
    Mistake("the-best-without-evaluations", ("--gin.Checkpointing.keep_best=2",), ("Checkpointing.keep_best", "2", "Evaluation.every")),
)  # fmt: skip
MISTAKES = (*DATA, *FOLDERS, *NAMES)


@pytest.fixture(scope="module")
def done(made_here, shell):
    """A run that has trained 6 steps."""
    made_here(*TRAIN, "--gin.MODEL_DIR=done")
    return shell.folder / "done"


def cases():
    for mistake in MISTAKES:
        marks = [pytest.mark.heavy] if mistake.name == "a-table-that-is-not-there" else []  # imports datasets
        yield pytest.param(mistake, id=mistake.name, marks=marks)


@pytest.mark.parametrize("mistake", list(cases()))
def test_a_mistake_is_told_before_the_compile(mistake, shell, here, done, monkeypatch):
    folder = shell.folder
    shutil.rmtree(folder / "run", ignore_errors=True)
    if mistake.resumes:
        shutil.copytree(done, folder / "run")
    if mistake.make is not None:
        mistake.make(folder)
    if mistake.missing is not None:
        monkeypatch.setitem(sys.modules, mistake.missing, None)
    compiled = []
    monkeypatch.setattr(setup, "compile_step", lambda *_: compiled.append("compiled") or sys.exit(99))
    begin_s = time.monotonic(), time.process_time()
    result = here(*TRAIN, *mistake.args)
    spent_s = min(time.monotonic() - begin_s[0], time.process_time() - begin_s[1])  # others may use the cores, too
    assert not compiled, result.out
    assert_one_line(result, *mistake.words)
    assert spent_s < LIMIT_S
    if not mistake.resumes and (folder / "run").exists():
        assert not any(os.scandir(folder / "run")), "a run that could not start has left files"


def assert_one_line(result, *words):
    assert result.code == 2 and "Traceback" not in result.out + result.err, result
    told = [line for line in result.err.splitlines() if line]
    assert len(told) == 1 and told[0].startswith("error: "), result.err
    for word in words:
        assert word in told[0]


assert len(MISTAKES) >= 42 and run_here
