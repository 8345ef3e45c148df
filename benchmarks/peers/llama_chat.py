"""Asks llama.cpp what a GGUF file answers: the last step of `make finetune`.

    python llama_chat.py FILE.gguf [--threads=2] [--count=60] < questions.txt

Runs wherever xllamacpp is installed and imports nothing of capibara: the file's own chat template and tokenizer are
used. Answers are greedy; a line of standard input is a question.
"""

from __future__ import annotations

import argparse
import sys

import llama_cpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--count", type=int, default=60, help="most tokens of an answer")
    args = parser.parse_args()
    server = llama_cpp.start(args.file, args.threads)
    for question in filter(None, map(str.strip, sys.stdin)):
        asked = {"messages": [{"role": "user", "content": question}], "max_tokens": args.count, "temperature": 0.0}
        said = llama_cpp.post(server, "/v1/chat/completions", asked)["choices"][0]["message"]["content"]
        print(f"> {question}\n{said.strip()}\n", flush=True)


if __name__ == "__main__":
    main()
