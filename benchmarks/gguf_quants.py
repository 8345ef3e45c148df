"""K-quants in GGUF files: ours against llama.cpp's own llama-quantize, byte by byte.

    python benchmarks/gguf_quants.py --llama=FOLDER [--file=MODEL.gguf] [--threads=1] [--json=OUT]

FOLDER has llama.cpp's shared libraries: `npm pack @node-llama-cpp/linux-x64`, its bins/linux-x64. The model is drawn
(Llama, 8 layers of 1024, tied) or a file; it is written in float32 once, and quantized from there into every mixture by
both, one after the other, with the same threads. Every tensor's bytes and all metadata are compared.

  MB/s    of float32 that is quantized in a second: the file's size over the clock, reading and writing included.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
from rich.console import Console
from rich.table import Table

from capibara.interop.gguf import names as gguf_names
from capibara.interop.gguf import types as gguf_types
from capibara.interop.gguf.read import open_gguf
from capibara.interop.gguf.write import write_gguf

PEER = pathlib.Path(__file__).resolve().parent / "peers" / "llama_quantize.py"
DTYPES = ("q8_0", *gguf_types.MIXTURES)
DRAWN = dict(
    model_type="llama", vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
    num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2048, rms_norm_eps=1e-5,
    tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)  # fmt: skip


def drawn() -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a model whose weights are those of none."""
    draw = np.random.default_rng(0)
    for tensor in gguf_names.of_config({"model_type": "llama"}).tensors(DRAWN):
        yield tensor.name, 0.02 * draw.standard_normal(tensor.shape, np.float32)


def differences(ours: str, theirs: str) -> tuple[int, int, list[str]]:
    """How many tensors there are, how many of them are the same, and metadata that are not."""
    mine, others = gguf.GGUFReader(ours), gguf.GGUFReader(theirs)
    tensors = {tensor.name: tensor for tensor in mine.tensors}
    same = sum(
        tensor.tensor_type == tensors[tensor.name].tensor_type
        and np.array_equal(tensor.data, tensors[tensor.name].data)
        for tensor in others.tensors
    )
    fields = [{key: field.contents() for key, field in reader.fields.items()} for reader in (mine, others)]
    return len(others.tensors), same, [key for key in fields[1] if fields[0].get(key) != fields[1][key]]


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """All results."""
    source = os.path.join(folder, "f32.gguf")
    found = open_gguf(args.file) if args.file else None
    if found is None:
        write_gguf(source, DRAWN, drawn(), {}, dtype="f32")
    else:
        values = ((name, found.read(name)) for name in found.shapes())
        write_gguf(source, found.config, values, found.tokenizer, found.about, dtype="f32")
    model, mb = open_gguf(source), os.path.getsize(source) / 1e6
    result: dict[str, Any] = {"file": args.file or "drawn", "threads": args.threads, "mb": mb, "dtypes": {}}
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    for dtype in args.dtypes.split(","):
        ours, theirs = (os.path.join(folder, f"{who}.gguf") for who in ("ours", "theirs"))
        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(args.repeats):
            start = time.perf_counter()
            values = ((name, model.read(name)) for name in model.shapes())
            write_gguf(ours, model.config, values, model.tokenizer, model.about, dtype=dtype)
            seconds["ours"].append(time.perf_counter() - start)
            file_type = int(gguf.LlamaFileType[f"MOSTLY_{dtype.upper()}"])
            command = [
                sys.executable,
                str(PEER),
                args.llama,
                source,
                theirs,
                str(file_type),
                f"--threads={args.threads}",
            ]
            told = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            seconds["theirs"].append(float(told.stdout))
        count, same, metadata = differences(ours, theirs)
        result["dtypes"][dtype] = {
            "tensors": count,
            "same": same,
            "metadata": metadata,
            "bytes": os.path.getsize(ours),
            "mb_s": {who: mb / float(np.median(times)) for who, times in seconds.items()},
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", metavar="FOLDER", help="has libllama, libggml and libggml-base")
    parser.add_argument("--file", metavar="GGUF", help="in place of a drawn model")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    if not args.llama:
        print("without --llama there is nobody to compare with: see --help")
        return
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, folder)
    table = Table(title=f"{os.path.basename(result['file'])}: {result['mb']:.0f} MB of float32, {args.threads} threads")
    for heading in ("mixture", "MB", "same tensors", "other metadata", "ours, MB/s", "llama.cpp, MB/s"):
        table.add_column(heading, justify="left" if heading == "mixture" else "right")
    for dtype, row in result["dtypes"].items():
        same, other = f"{row['same']} of {row['tensors']}", ", ".join(row["metadata"]) or "none"
        ours, theirs = (f"{row['mb_s'][who]:.0f}" for who in ("ours", "theirs"))
        table.add_row(dtype, f"{row['bytes'] / 1e6:.0f}", same, other, ours, theirs)
    Console().print(table)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
