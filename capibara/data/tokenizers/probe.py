"""A program that loads a tokenizer from its standard input and encodes texts with it, under limits of time and memory.

Standard input: the length of a JSON value [kind, texts] in 8 bytes, this JSON, and the tokenizer's file. Prints "fine" or
what is wrong. It is a separate process because the libraries abort, crash or loop on some files; it imports nothing of
capibara.
"""

import json
import resource
import sys

CPU_S, DATA_BYTES = 5, 900 << 20


def main() -> int:
    """Loads and uses the tokenizer; returns the exit code."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    stream = sys.stdin.buffer
    kind, texts = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    try:
        _json(stream.read(), texts) if kind == "json" else _sentencepiece(stream.read(), texts)
    except BaseException as error:  # panics of Rust are not Exceptions
        print(f"wrong: {str(error)[:400] or type(error).__name__}")
        return 1
    print("fine")
    return 0


def _json(content: bytes, texts: list[str]) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_buffer(content)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.get_vocab(with_added_tokens=True)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) > 64 * len(text) + 64:
            raise ValueError(f"{len(ids)} tokens for {len(text)} characters")
        tokenizer.decode(ids)
    tokenizer.encode("")


def _sentencepiece(content: bytes, texts: list[str]) -> None:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    for i in range(len(model)):
        model.id_to_piece(i), model.get_score(i)
        if model.is_byte(i):
            int(model.id_to_piece(i)[3:5], 16)
    for text in texts:
        ids = model.encode(text)
        if len(ids) > 64 * len(text) + 64:
            raise ValueError(f"{len(ids)} tokens for {len(text)} characters")
        model.decode(ids)


if __name__ == "__main__":
    sys.exit(main())
