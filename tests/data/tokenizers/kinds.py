"""Small tokenizers of many kinds, made by the tokenizers library, and random texts of many sorts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

MARK = "\u2581"
CORPUS = [
    f"def function_{i}(self, value):\n\treturn value * {i}  # na\u00efve caf\u00e9, the river and the reeds\n"
    for i in range(60)
] + [
    "Die Flu\u00dfpferde schwimmen. \u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440! \u4f60\u597d\u4e16\u754c \u306b\u307b\u3093 # Title\n\n* a list\n    code"
] * 8
BYTES = [f"<0x{i:02X}>" for i in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]
ADDED = [
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False, rstrip=True),
    AddedToken("<mask>", special=True, normalized=False, lstrip=True),
    AddedToken("</tool_call>", special=False, normalized=False),
    AddedToken("value", special=False, normalized=True, single_word=True),
    AddedToken("na\u00efve", special=False, normalized=True),
    AddedToken("  tab", special=False, normalized=False, lstrip=True, rstrip=True),
]


def byte_level_bpe() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def byte_level_with_added_tokens() -> Tokenizer:
    made = byte_level_bpe()
    pattern = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\r\n\p{L}\p{N}]?\p{L}+|\s+"
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.add_tokens(ADDED)
    return made


def _sentencepiece_like(byte_fallback: bool = True) -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=byte_fallback, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", MARK)
    special = SPECIAL + (BYTES if byte_fallback else [])
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False))
    values = json.loads(made.to_str())  # the bytes are tokens of the model, not added ones
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(values))


def _llama_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def llama_2() -> Tokenizer:
    made = _sentencepiece_like()
    made.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    made.decoder = _llama_decoder()
    return made


def llama_2_with_added_tokens() -> Tokenizer:
    made = llama_2()
    made.add_tokens(ADDED)
    return made


def gemma() -> Tokenizer:
    made = _sentencepiece_like()
    made.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def bpe_of_another_mark() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u00b7", prepend_scheme="always")
    made.decoder = decoders.Metaspace(replacement="\u00b7", prepend_scheme="always")
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False))
    made.add_tokens(ADDED)
    return made


def bpe_of_a_replaced_mark() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "\u2423")
    made.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("\u2423", " "), decoders.Strip(" ", 2, 0)])
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False))
    return made


def bpe_with_a_suffix() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens(ADDED)
    return made


def _unigram(scheme: str, byte_fallback: bool, mark: str = MARK) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=mark, prepend_scheme=scheme)
    pieces = SPECIAL + (BYTES if byte_fallback else [])
    trainer = trainers.UnigramTrainer(vocab_size=260, special_tokens=pieces, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    values = json.loads(made.to_str())
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] in SPECIAL]
    values["model"]["byte_fallback"] = byte_fallback
    made = Tokenizer.from_str(json.dumps(values))
    made.decoder = decoders.Metaspace(replacement=mark, prepend_scheme=scheme)
    if byte_fallback:
        made.decoder = decoders.Sequence([decoders.ByteFallback(), made.decoder])
    return made


def unigram() -> Tokenizer:
    return _unigram("always", byte_fallback=False)


def unigram_with_bytes() -> Tokenizer:
    made = _unigram("first", byte_fallback=True)
    made.add_tokens(ADDED)
    return made


def unigram_of_another_mark() -> Tokenizer:
    return _unigram("never", byte_fallback=False, mark="_")


def word_piece(prefix: str = "##", cleanup: bool = True) -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]", continuing_subword_prefix=prefix))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix=prefix, cleanup=cleanup)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=special, continuing_subword_prefix=prefix, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def word_piece_of_another_prefix() -> Tokenizer:
    made = word_piece("@@", cleanup=False)
    made.add_tokens(ADDED)
    return made


def word_level() -> Tokenizer:
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.Whitespace()])
    made.train_from_iterator(
        CORPUS, trainers.WordLevelTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    )
    return made  # without a decoder


def ctc() -> Tokenizer:
    letters = ["<pad>", "|", *SPECIAL, *"abcdefghijklmnopqrstuvwxyz'.,?!\u00e9"]
    made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(" ", "|")])
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.CTC(pad_token="<pad>", word_delimiter_token="|", cleanup=True)
    made.add_special_tokens(SPECIAL)
    return made


def byte_level_and_more() -> Tokenizer:
    made = byte_level_bpe()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("#", "%"), decoders.Strip(" ", 1, 0)])
    return made


def accents_stripped() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    steps = [normalizers.NFD(), normalizers.StripAccents(), normalizers.Strip(), normalizers.Lowercase()]
    made.normalizer = normalizers.Sequence(steps)
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.Metaspace(), decoders.Fuse()])
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=250, special_tokens=SPECIAL, show_progress=False))
    made.add_tokens(ADDED)
    return made


def joined_and_replaced() -> Tokenizer:
    """Its text is only certain at the end: a pattern runs over the text of all tokens."""
    made = _sentencepiece_like()
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(Regex(f"{MARK}[#.,v]"), "!")]
    made.decoder = decoders.Sequence(steps)
    return made


KINDS: list[Callable[[], Tokenizer]] = [
    byte_level_bpe, byte_level_with_added_tokens, llama_2, llama_2_with_added_tokens, gemma, bpe_of_another_mark,
    bpe_of_a_replaced_mark, bpe_with_a_suffix, unigram, unigram_with_bytes, unigram_of_another_mark, word_piece,
    word_piece_of_another_prefix, word_level, ctc, byte_level_and_more, accents_stripped, joined_and_replaced,
]  # fmt: skip

_PARTS = [
    "def f(x):\n\treturn x + 1  # value\n", "for i in range(10):\n        print(i)\n", "# Title\n\n* one\n* two\n\n```py\nx\n```",
    "the river", "Caf\u00e9 na\u00efve", "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440", "\u4f60\u597d\uff0c\u4e16\u754c", "\u306b\u307b\u3093\u3054", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "\u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f999", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\ufb01 \u00b2 \u212b", "e\u0301", "\u2581", "\u2581\u2581x", "\u2423", "\u00b7", "_", "\ufffd", "\x00", "\x07", "\u200b", "\ufeff",
    " ", "  ", "        ", "\t", "\n", "\r\n", "\n\n\n", "\u00a0", "\u3000", "<0xE2>", "<0x41>", "</s>", "<s>", "<unk>", "<pad>",
    "<|im_start|>", "<|im_end|>  ", "  <mask>", "</tool_call>", "value", "values", "  tab ", "##ing", "@@x", "</w>", "|", "''",
    " .", " ,", " n't", "don't", " 's", "1234567", "3.14", "{\"a\": [1, 2]}", "https://example.com/?q=%20", "ABC", "\u1e9e", "\u0130",
]  # fmt: skip
_RANGES = [
    (0x20, 0x7E),
    (0xA0, 0x17F),
    (0x370, 0x4FF),
    (0x4E00, 0x4FFF),
    (0x1F600, 0x1F64F),
    (0x2000, 0x206F),
    (0x2580, 0x2583),
]


def texts(count: int, seed: int = 0) -> Iterator[str]:
    """Texts of code, Markdown, scripts, marks, spellings of tokens, runs of spaces, and random characters."""
    rng = random.Random(seed)
    yield ""
    for _ in range(count - 1):
        parts = []
        for _ in range(rng.randint(1, 9)):
            parts.append(rng.choice(_PARTS) if rng.random() < 0.8 else chr(rng.randint(*rng.choice(_RANGES))))
            parts.append(rng.choice(["", "", " "]))
        yield "".join(parts)


def ids(tokenizer: tokenizers.Tokenizer, count: int, seed: int = 0) -> Iterator[list[int]]:
    """Lists of any ids, as a model may write them: bytes that are no characters, special tokens, unused ids."""
    rng = random.Random(seed)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocab.values()) + 1
    chosen = [i for token, i in vocab.items() if token.startswith("<") or MARK in token or "</w>" in token] or [0]
    for _ in range(count):
        share = rng.random()
        yield [
            rng.choice(chosen) if rng.random() < share else rng.randrange(size + 3) for _ in range(rng.randint(0, 70))
        ]
