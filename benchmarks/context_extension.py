"""A longer context without training: LongRoPE's search beside YaRN, NTK-aware and linear scaling, on a small decoder.

    python benchmarks/context_extension.py --out=build/context_extension

A decoder of 0.3M parameters is trained here on bytes of the standard library in rows of 256 tokens. `capibara prepare rope` then
searches a scaling for rows of 1,024 and 2,048 tokens on a few modules that the training did not have, and all scalings are compared
on others of them. Losses are in nats a byte; `short` is that of rows of 256.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # the checkout's package, installed or not

import capibara as cb  # noqa: E402

ORIGINAL, LENGTHS = 256, (1024, 2048)
MODEL = cb.DecoderConfig(
    vocab_size=384, embed_dim=64, num_layers=4, num_heads=2, mlp_dim=256, dtype="float32", rope=cb.Rope(theta=10_000.0)
)


def write_modules(folder: pathlib.Path, longest: int) -> tuple[str, str]:
    """Modules of the standard library as JSON lines, for the training and, each above `longest` bytes, for the search."""
    paths = sorted(pathlib.Path(json.__file__).parent.parent.rglob("*.py"))
    paths = [path for path in paths if "site-packages" not in path.parts and path.stat().st_size > 500]
    texts: dict[str, list[str]] = {"train": [], "held_out": []}
    for number, path in enumerate(paths):
        text = path.read_text("utf-8", errors="ignore")
        name = "held_out" if number % 10 == 0 else "train"
        if name == "train" or len(text) > longest + 1:
            texts[name].append(text)
    for name, chosen in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
    return str(folder / "train.jsonl"), str(folder / "held_out.jsonl")


def train(folder: str, data: str, steps: int) -> None:
    """Trains the decoder, unless it is there."""
    if os.path.exists(folder):
        return
    cb.train(
        cb.Trainer(
            model_dir=folder,
            steps=steps,
            model=MODEL,
            plan=cb.Plan(batch_size=16),
            optimizer=cb.Optimizer(schedule=cb.Schedule(learning_rate=3e-3)),
            dataset=cb.Dataset(source=cb.JsonlSource(files=(data,)), vocabulary=cb.ByteVocabulary(), length=ORIGINAL),
        )
    )


def main() -> None:
    """Trains, searches and prints a table for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of the run, the searches and results.json")
    parser.add_argument("--steps", type=int, default=1000, help="of the training")
    parser.add_argument("--iterations", type=int, default=20, help="generations of the search")
    parser.add_argument("--unscaled", action="store_true", help="also search the number of first tokens")
    args = parser.parse_args()
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    data, held_out = write_modules(out, max(LENGTHS))
    train(str(out / "run"), data, args.steps)
    results = {}
    for length in LENGTHS:
        for tokens in ((0,), (0, 4, 16, 64, 256))[: 1 + args.unscaled]:
            name = f"{length} tokens" + (", first tokens searched" if len(tokens) > 1 else "")
            began = time.perf_counter()
            settings = cb.RopeSearch(documents=8, iterations=args.iterations, unscaled_tokens=tokens)
            folder = str(out / name.replace(", ", "_").replace(" ", "_"))
            result = cb.prepare_rope(
                str(out / "run"), held_out, folder, length, original_length=ORIGINAL, settings=settings
            )
            results[name] = result | {"seconds": time.perf_counter() - began}
            print(f"{name}: {result['scalings']} scalings in {results[name]['seconds']:.0f} s")
            print(f"{'':10}{'search':>10}{'test':>10}{'short':>10}")
            for scaling, loss in result["loss"].items():
                print(f"{scaling:10}{loss:10.4f}{result['test'][scaling]:10.4f}{result['short'][scaling]:10.4f}")
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
