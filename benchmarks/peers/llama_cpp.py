"""The llama.cpp side of benchmarks/gguf_files.py: loads a GGUF file and answers for it.

    python llama_cpp.py FILE.gguf [--threads=1] [--lora=ADAPTER.gguf]

Runs wherever xllamacpp is installed and imports nothing of capibara. Says `ready` in one JSON line, then answers each
line of standard input with one JSON line: {"op": "tokenize", "text": ...}, or {"op": "continue", "ids": [...],
"count": N, "best": K}: the N most likely tokens one after the other, and log probabilities of the K best at each.
The keys and values of attention are kept in float32, so that a float32 file is computed in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.request
from typing import Any

import xllamacpp


def start(path: str, threads: int, lora: str | None = None) -> xllamacpp.Server:
    """A server of the file, in this process."""
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.warmup = 512, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if lora is not None:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(lora, 1.0)]
    params.port, params.verbosity = 0, 0
    return xllamacpp.Server(params)


def post(server: xllamacpp.Server, path: str, request: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps(request).encode()
    asked = urllib.request.Request(f"{server.listening_address}{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        return json.loads(answer.read())


def answer(server: xllamacpp.Server, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one line of standard input."""
    if request["op"] == "tokenize":
        return {"ids": post(server, "/tokenize", {"content": request["text"], "parse_special": True})["tokens"]}
    best = request.get("best", 0)
    asked = {"prompt": request["ids"], "n_predict": request["count"], "n_probs": best, "temperature": 0.0}
    got = post(server, "/completion", asked | {"return_tokens": True, "cache_prompt": False})
    found = [
        [(top["id"], top["logprob"]) for top in position["top_logprobs"]]
        for position in got.get("completion_probabilities", ())
    ]
    return {"ids": got["tokens"], "text": got["content"], "best": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lora", metavar="GGUF", help="adapters that are added to it")
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")  # llama.cpp itself writes to standard output
    os.dup2(2, 1)
    server = start(args.file, args.threads, args.lora)
    print(json.dumps({"ready": xllamacpp.__version__}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(server, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
