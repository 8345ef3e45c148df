"""Accuracy of questions about documents of 512 to 524,288 tokens, read in chunks with a memory, before and after GRPO.

    python benchmarks/memory_agent.py [--folder=runs/memory_agent] [--steps=8] [--json=OUT] [--picture=OUT]

A decoder of 0.4 M parameters (a short convolution and a layer of attention without positions) learns from given memories to look
up a fact in a chunk of at most 512 tokens, to keep it, and to answer; then GRPO trains all conversations about documents of 4,096
tokens on the reward of the answer alone. Tasks of `capibara prepare ruler` are asked: `needle`, a fact in prose; `needles`, one of eight
facts in prose, and `facts`, a fact among facts: questions about the standard library's docstrings are too hard for a model of
this size. Documents of the evaluation are not those of training. The same model without RL is the baseline; the model
without a memory reads whole documents in rows as long as they are. Live bytes on the device and the process's resident bytes are
printed for each length. Exit code 1 where the accuracy of a task at the largest length is below 0.8 of that at 4,096 tokens, or
live bytes grow.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout's package, installed or not

import capibara as cb  # noqa: E402
from capibara.builders.ruler.build import Ruler, examples, write  # noqa: E402
from capibara.builders.ruler.words import FILLER, KEYS, VALUES  # noqa: E402
from capibara.inference.interactive import chat as chats  # noqa: E402
from capibara.inference.memory_agent.prompts import Prompts  # noqa: E402
from capibara.inference.memory_agent.reading import Reading, read  # noqa: E402
from capibara.monitoring.metrics_file.loggers import read_metrics  # noqa: E402

TASKS, OF_TRAINING = ("needle", "needles", "facts"), ("needle", "facts")
CHUNK, TRAINED, ROW = 512, 4096, 576
WITHOUT_MEMORY = (512, 4096)
GOAL = 0.8
FACT, QUESTION, EMPTY = "note {key} {value}.", "about {key}?", " nothing"
UPDATE = "memory\n{memory}\ntext\n{chunk}\nask\n{question}"
ANSWER = "memory\n{memory}\nask\n{question}\nanswer"
WHOLE = "text\n{text}\nask\n{question}"
AGENT = cb.MemoryAgent(chunk_tokens=CHUNK, memory_tokens=4, update=UPDATE, answer=ANSWER, empty_memory=EMPTY)
GREEDY = cb.Sampling(max_new_tokens=4, temperature=0.0)


def write_tokenizer(folder: pathlib.Path) -> str:
    """A tokenizer with a token for each word of the documents, and a chat template that adds nothing to a message."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = " ".join((*KEYS, *VALUES, *FILLER, UPDATE, ANSWER, WHOLE, FACT, QUESTION, "none nothing list"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = dict(vocab_size=2000, initial_alphabet=letters, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator([text] * 4, trainers.BpeTrainer(**options))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return str(folder)


def text_of(rng: np.random.Generator, dense: bool, tokens: int, facts: Sequence[str], apart: Sequence[str]) -> str:
    """A text of about so many tokens with these facts, and others (`dense`) or prose around them; `apart`: keys it may not have."""
    others, parts, room = [key for key in KEYS if key not in apart], [*facts], tokens - 4 * len(facts)
    while room > 0:
        if dense:
            line = FACT.format(key=others[rng.integers(len(others))], value=VALUES[rng.integers(len(VALUES))])
        else:
            line = FILLER[rng.integers(len(FILLER))]
        room -= 4 if dense else len(line.split()) + 2
        parts.insert(rng.integers(len(parts) + 1), line)
    return " " + " ".join(parts)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Conversations of a stage: shares of KINDS, tokens of texts, the share of texts of facts, and facts of a list."""

    shares: tuple[float, ...]
    sizes: tuple[int, ...]
    dense: float = 0.5
    listed: tuple[int, ...] = (6, 12)


KINDS = ("list", "new", "nothing", "old", "answer", "whole")
SHORT = Stage((0.5, 0.15, 0.08, 0.12, 0.07, 0.08), (8, 16, 24, 40), listed=(2, 4, 6))
CHUNKS = Stage((0.3, 0.22, 0.12, 0.18, 0.08, 0.1), (24, 60, 200, 500, 500))
KEEP = Stage(
    (0.0, 0.25, 0.1, 0.5, 0.1, 0.05), (200, 500, 500, 500), dense=0.8
)  # one memory in a thousand must not be lost


def write_conversations(path: pathlib.Path, count: int, seed: int, stage: Stage) -> None:
    """Lines {"inputs", "targets"}: chunks with the memory that is right, answers, and lists of all facts of a text."""
    rng, lines, short = np.random.default_rng(seed), [], stage is SHORT
    for _ in range(count):
        dense, size = bool(rng.random() < stage.dense), int(rng.choice(stage.sizes))
        kind = str(rng.choice(KINDS, p=stage.shares))
        keys, values = rng.permutation(KEYS)[:12].tolist(), rng.choice(VALUES, 12).tolist()
        facts = [FACT.format(key=key, value=value) for key, value in zip(keys, values)]
        question, right, unknown = QUESTION.format(key=keys[0]), f" {keys[0]} {values[0]}", f" {keys[0]} none"
        before = unknown if rng.random() < 0.5 else EMPTY
        if kind == "list":
            n = int(rng.choice(stage.listed))
            text = text_of(rng, dense, 0 if short else int(rng.choice([50, 200, 450])), facts[:n], keys)
            inputs, targets = f"text\n{text}\nlist", "".join(f" {keys[i]} {values[i]}" for i in rng.permutation(n))
        elif kind == "answer":
            inputs, targets = ANSWER.format(question=question, memory=right), f" {values[0]}"
        else:
            text = text_of(rng, dense, size, facts[:1] if kind in ("new", "whole") else [], keys[:1])
            memory, targets = right if kind == "old" else before, unknown if kind == "nothing" else right
            inputs = (
                WHOLE.format(question=question, text=text)
                if kind == "whole"
                else UPDATE.format(question=question, memory=memory, chunk=text)
            )
        lines.append(json.dumps({"inputs": inputs, "targets": targets}))
    path.write_text("\n".join(lines) + "\n")


def base_run(
    folder: pathlib.Path, tokenizer: str, name: str, rows: int, length: int, steps: int, **more: Any
) -> cb.Trainer:
    """A run on given conversations."""
    vocabulary = cb.TokenizerJsonVocabulary(path=tokenizer)
    return cb.Trainer(
        model_dir=str(folder / name),
        steps=steps,
        model=cb.DecoderConfig(
            vocab_size=vocabulary.size, embed_dim=128, num_layers=2, num_heads=2, mlp_dim=256, mixer=cb.ShortConv(),
            layer_pattern=("recurrent", "unrotated"), qk_norm="head", attention_scale=1.0, dtype="float32",
        ),  # fmt: skip
        plan=cb.Plan(batch_size=rows),
        dataset=cb.Dataset(
            source=cb.JsonlSource(
                files=(str(folder / f"{name}.jsonl"),), validation_files=(str(folder / "held_out.jsonl"),),
                inputs_field="inputs", field="targets",
            ),
            vocabulary=vocabulary, length=length,
        ),
        optimizer=cb.Optimizer(schedule=cb.Schedule(learning_rate=5e-3 if more == {} else 3e-3, warmup_steps=50), weight_decay=0.0),
        evaluation=cb.Evaluation(every=steps),
        checkpointing=cb.Checkpointing(every=steps),
        log_every=50,
        **more,
    )  # fmt: skip


def rewarded(base: cb.Trainer, folder: pathlib.Path, tokenizer: str, steps: int) -> cb.Trainer:
    """GRPO of all conversations about documents of TRAINED tokens, with DAPO's clipping and mean over tokens."""
    chunks = -(-TRAINED // CHUNK)
    source = cb.PromptJsonlSource(
        files=(str(folder / "documents.jsonl"),), validation_files=(str(folder / "documents_held_out.jsonl"),),
        template=cb.ChatTemplate(tokenizer=tokenizer),
    )  # fmt: skip
    loss = cb.Grpo(
        rewards=(cb.exact_answer,), group=8, memory=AGENT, max_chunks=chunks, surrogate=cb.Clipped(high=0.28),
        token_weights="batch", updates=2, sampling=cb.Sampling(max_new_tokens=4, temperature=1.0),
        engine=cb.EngineConfig(slots=32, prefix_cache_mib=0, prefill_tokens=8192),
    )  # fmt: skip
    return dataclasses.replace(
        base,
        model_dir=str(folder / "rewarded"),
        init_from=base.model_dir,
        steps=steps,
        plan=cb.Plan(batch_size=4 * 8 * (chunks + 1), accumulation=4),
        dataset=dataclasses.replace(base.dataset, source=source, packing="none", length=ROW),
        loss=loss,
        optimizer=cb.Optimizer(
            schedule=cb.Schedule(kind="constant", learning_rate=1e-4, warmup_steps=2, warmup_fraction=0.0),
            weight_decay=0.0,
        ),
        evaluation=cb.Evaluation(every=0),
        checkpointing=cb.Checkpointing(every=steps),
        log_every=1,
    )


def trained(run: cb.Trainer) -> float:
    """Trains a run, or resumes it; one that has ended is left as it is. Returns seconds."""
    begin_s = time.perf_counter()
    done = [row["step"] for row in read_metrics(run.model_dir)] if pathlib.Path(run.model_dir).exists() else []
    if max(done, default=0) < run.steps:
        cb.train(run)
    return time.perf_counter() - begin_s


def model_of(folder: str, length: int) -> cb.LanguageModel:
    slots, fields = max(1, min(32, 32768 // length)), "EngineConfig.prefix_cache_mib = 0"
    return cb.load(
        folder,
        bindings=[
            f"Dataset.length = {length}",
            f"EngineConfig.slots = {slots}",
            fields,
            "EngineConfig.prefill_tokens = 8192",
        ],
    )


def held_bytes() -> dict[str, int]:
    """Bytes of live arrays on the device, and of the process (resident)."""
    import jax

    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return {"live": sum(array.nbytes for array in jax.live_arrays()), "resident": pages * 4096}


def asked(length: int, count: int, vocabulary: cb.TokenizerJsonVocabulary) -> list[dict[str, Any]]:
    settings = Ruler(tasks=TASKS, lengths=(length,), examples=count, fact=FACT, question=QUESTION, seed=2)
    return [*examples(settings, vocabulary)]


def scored(
    model: cb.LanguageModel, lines: Sequence[dict[str, Any]], answers: Callable[[], Sequence[str]]
) -> dict[str, Any]:
    """The accuracy of each task, and what reading has needed."""
    begin_s = time.perf_counter()
    texts = answers()
    right = {task: [] for task in TASKS}
    for line, text in zip(lines, texts, strict=True):
        right[line["task"]].append(text.split()[-1:] == [line["answer"]])
    result: dict[str, Any] = {task: float(np.mean(values)) for task, values in right.items()}
    return result | {"seconds": round(time.perf_counter() - begin_s, 1), "bytes": held_bytes()}


def with_memory(model: cb.LanguageModel, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    dataset = model.loaded.dataset
    prompts = Prompts(AGENT, dataset, chats.of_run(dataset, template=model.template))
    readings = [Reading(prompts, line["document"], line["question"], GREEDY, where=line["task"]) for line in lines]
    return scored(model, lines, lambda: [answer.text for answer in read(model.engine, readings)])


def without_memory(model: cb.LanguageModel, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    prompts = [WHOLE.format(question=line["question"], text=" " + line["document"]) for line in lines]
    return scored(model, lines, lambda: model.generate(prompts, temperature=0.0, max_new_tokens=4))


def draw(curves: dict[str, dict[int, dict[str, Any]]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, each = pyplot.subplots(1, len(TASKS), figsize=(11, 3.6), sharey=True)
    for axes, task in zip(each, TASKS):
        for name, curve in curves.items():
            points = {length: entry[task] for length, entry in sorted(curve.items()) if task in entry}
            axes.plot([*points], [*points.values()], marker="o", label=name)
        axes.axvline(TRAINED, color="grey", linewidth=0.8, linestyle=":")
        axes.set(xscale="log", xlabel="tokens of the document", title=task, ylim=(-0.03, 1.03))
    each[0].set_ylabel("accuracy")
    each[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def start(folder: pathlib.Path, tokenizer: str, first: int, second: int, third: int) -> cb.Trainer:
    """Trains the model that all others begin from: on short texts, on chunks, and on keeping what it has found."""
    write_conversations(folder / "short.jsonl", 40_000, 0, SHORT)
    write_conversations(folder / "chunks.jsonl", 20_000, 1, CHUNKS)
    write_conversations(folder / "held_out.jsonl", 200, 2, CHUNKS)
    write_conversations(folder / "keep.jsonl", 20_000, 3, KEEP)
    trained(short := base_run(folder, tokenizer, "short", 32, 96, first))
    trained(chunks := base_run(folder, tokenizer, "chunks", 8, ROW, second, init_from=short.model_dir))
    trained(keep := base_run(folder, tokenizer, "keep", 8, ROW, third, init_from=chunks.model_dir))
    return keep


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/memory_agent"))
    parser.add_argument("--steps", type=int, default=8, help="of GRPO")
    parser.add_argument(
        "--warm_up",
        default="1200,3000,2000",
        help="steps on given conversations: short texts, chunks, chunks that keep",
    )
    parser.add_argument("--lengths", default="512,4096,16384,131072,524288")
    parser.add_argument("--examples", type=int, default=16, help="of a task; half as many from 131,072 tokens on")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--picture", type=pathlib.Path)
    args = parser.parse_args(argv)
    folder, lengths = args.folder.resolve(), [int(length) for length in args.lengths.split(",")]
    tokenizer = write_tokenizer(folder / "tokenizer")
    vocabulary, begin_s = cb.TokenizerJsonVocabulary(path=tokenizer), time.perf_counter()
    stages = map(int, args.warm_up.split(","))
    for name, count, seed in (("documents", 200, 0), ("documents_held_out", 4, 1)):
        settings = Ruler(
            tasks=OF_TRAINING, lengths=(TRAINED - 64,), examples=count, fact=FACT, question=QUESTION, seed=seed
        )
        write(settings, vocabulary, str(folder / f"{name}.jsonl"))
    base = start(folder, tokenizer, *stages)
    seconds = {"warm-up": time.perf_counter() - begin_s}
    seconds["GRPO"] = trained(run := rewarded(base, folder, tokenizer, args.steps))
    rewards = [row["reward"] for row in read_metrics(run.model_dir) if row["kind"] == "train" and "reward" in row]
    print(f"mean reward of the first and last five steps: {np.mean(rewards[:5]):.2f}, {np.mean(rewards[-5:]):.2f}")
    curves: dict[str, dict[int, dict[str, Any]]] = {"memory and GRPO": {}, "memory, no GRPO": {}, "no memory": {}}
    for name, path in (("memory and GRPO", run.model_dir), ("memory, no GRPO", base.model_dir)):
        model = model_of(path, ROW)
        for length in lengths:
            if length > TRAINED * 32 and name != "memory and GRPO":
                continue
            lines = asked(length, args.examples // (1 if length < 131072 else 2), vocabulary)
            curves[name][length] = report(name, length, with_memory(model, lines))
            save(args, curves, rewards)
        del model
    for length in WITHOUT_MEMORY:
        model = model_of(base.model_dir, length + 64)
        lines = asked(length, args.examples, vocabulary)
        curves["no memory"][length] = report("no memory", length, without_memory(model, lines))
        del model
        save(args, curves, rewards)
    curve = curves["memory and GRPO"]
    ratio = {task: curve[max(lengths)][task] / max(curve[TRAINED][task], 1e-9) for task in TASKS}
    live = {curve[length]["bytes"]["live"] for length in lengths if length >= 16384}
    seconds |= {"all": time.perf_counter() - begin_s}
    print(
        f"accuracy at {max(lengths):,} tokens over that at {TRAINED:,}: {ratio}; live bytes {sorted(live)}; seconds {seconds}"
    )
    return 0 if min(ratio.values()) >= GOAL and len(live) == 1 else 1


def save(args: argparse.Namespace, curves: dict[str, dict[int, dict[str, Any]]], rewards: Sequence[float]) -> None:
    """Writes what is measured so far."""
    if args.json:
        args.json.write_text(json.dumps({"curves": curves, "rewards": rewards}, indent=1) + "\n")
    if args.picture:
        draw(curves, args.picture)


def report(name: str, length: int, result: dict[str, Any]) -> dict[str, Any]:
    """Prints a result as a line, and returns it."""
    held = result["bytes"]
    scores = ", ".join(f"{task} {result[task]:.2f}" for task in TASKS)
    print(
        f"{name:16} {length:>7,} tokens: {scores}, {result['seconds']:.0f} s, {held['live']:,} live bytes, "
        f"{held['resident'] / 2**20:,.0f} MiB resident",
        flush=True,
    )
    return result


if __name__ == "__main__":
    sys.exit(main())
