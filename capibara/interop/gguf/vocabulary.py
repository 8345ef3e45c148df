"""Converts tokenizers between a GGUF file's metadata and the files of a Hugging Face checkpoint.

GGUF stores what llama.cpp needs: tokens, their types, merges or scores, and the name of a pre-tokenizer. Here that name
stands for a list of splits, which is converted to the pre_tokenizer of a tokenizer.json, or recognised in one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.tokenizers import added as added_tokens
from capibara.data.tokenizers import files as tokenizer_files
from capibara.data.tokenizers import limits as tokenizer_limits

# Names of the special tokens in tokenizer_config.json, and in GGUF's keys.
KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_MORE_ENDS = ("eot", "eom")  # end of turn and end of message, besides the end token
# Special tokens that always end a text in llama.cpp.
_ENDS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>")
    + ("<|end_of_text|>", "<EOT>", "_<EOT>", "<end_of_utterance>")
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # ggml's token types
SPACE = "\u2581"  # a space in SentencePiece's pieces
_ODD = "\uff21  \ufb01"  # a text that common normalisations change
PADDING = "[PAD{}]"  # the name of a token that only pads the embedding

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD_START = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_4O = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


@dataclasses.dataclass(frozen=True)
class Pre:
    """How text is split before byte-level merges.

    Attributes:
      splits: regular expressions whose matches are separate pieces, "digits" for single digits, "gpt2" for GPT-2's
        words.
      ignore_merges: whether a piece that is a token becomes that token, regardless of the merges.
      adds_bos: whether text begins with the beginning token if the file does not say.
      also: other splits that do the same, as tokenizer.json files have them.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    also: tuple[tuple[str, ...], ...] = ()


_LLAMA3 = rf"{_SUFFIXES}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CONTIGUOUS = ('Punctuation {"behavior": "Contiguous"}', "gpt2", 'Digits {"individual_digits": false}')

PRES = {
    "gpt-2": Pre(("gpt2",)),
    "smollm": Pre(("digits", "gpt2")),
    "llama-bpe": Pre((_LLAMA3,), ignore_merges=True, adds_bos=True),
    "glm4": Pre((_LLAMA3,), ignore_merges=True),
    "dbrx": Pre((_LLAMA3,)),
    "qwen2": Pre((rf"{_SUFFIXES}|{_WORDS}|\p{{N}}|{_REST}",)),
    # o200k, of gpt-oss.
    "gpt-4o": Pre(
        (rf"{_WORD_START}{_UPPER}*{_LOWER}+{_SUFFIXES}?|{_WORD_START}{_UPPER}+{_LOWER}*{_SUFFIXES}?|{_REST_4O}",)
    ),
    "tekken": Pre(
        (
            rf"{_WORD_START}{_UPPER}*{_LOWER}+|{_WORD_START}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        ),
        ignore_merges=True,
        adds_bos=True,
    ),
    "qwen35": Pre(
        (rf"{_SUFFIXES}|{_WORD_START}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",)
    ),
    "seed-coder": Pre((rf"{_SUFFIXES}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "bailingmoe": Pre(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)"
            r"|\s+",
        )
    ),
    "deepseek-v3": Pre(_DEEPSEEK),
    "falcon": Pre((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"), also=((*_CONTIGUOUS, "[0-9][0-9][0-9]"),)),
    "bloom": Pre((r" ?[^(\s|.,!?…。，、।۔،)]+",), also=((r" ?[^(\s|[.,!?…。，、।۔،])]+",),)),
    "default": Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
# Names with the same splits in llama.cpp.
_SAME = {
    **dict.fromkeys(
        ("phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat", "a.x-4.0", "mellum", "trillion", "granite-docling"),
        "gpt-2",
    ),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("smaug-bpe", "chatglm-bpe"), "dbrx"),
    **dict.fromkeys(("llama4", "kanana2", "minimax-m2"), "gpt-4o"),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "megrez", "kormo", "hunyuan", "solar-open", "grok-2"), "qwen2"),
    **dict.fromkeys(("hunyuan-dense", "joyai-llm"), "deepseek-v3"),
    **dict.fromkeys(("bailingmoe2", "llada-moe"), "bailingmoe"),
    **dict.fromkeys(("poro-chat", "gpt3-finnish"), "bloom"),
    "glm5": "glm4",
}


def files(values: Mapping[str, Any], path: str) -> dict[str, bytes]:
    """The tokenizer files from the metadata under "tokenizer." (without that prefix).

    Warns and omits tokenizer.json if llama.cpp's tokenizer is unknown here; `path` is for messages.

    Raises:
      UserError: the metadata are inconsistent.
    """
    _check_types(values, path)
    result: dict[str, bytes] = {}
    model, pre = values.get("ggml.model"), values.get("ggml.pre", "default")
    pre = _SAME.get(pre, pre)
    tokens = values.get("ggml.tokens", [])
    needed = {"llama": ("scores", "token_type"), "gpt2": ("merges",)}.get(str(model), ())
    if needed and (not tokens or any(f"ggml.{name}" not in values for name in needed)):
        raise UserError(f"{path}: tokenizer.ggml has not all of tokens, {', '.join(needed)}: the file is corrupted")
    if any(len(values.get(f"ggml.{name}", tokens)) != len(tokens) for name in ("scores", "token_type")):
        raise UserError(f"{path}: tokenizer.ggml has more tokens than scores or types, or fewer: the file is corrupted")
    if model == "llama":
        created, adds_bos = _sentencepiece(values), values.get("ggml.add_bos_token", True)
    elif model == "gpt2" and pre in PRES:
        created, adds_bos = _byte_level(values, PRES[pre], path), values.get("ggml.add_bos_token", PRES[pre].adds_bos)
    elif model in (None, "no_vocab"):
        return result
    else:
        why = f"tokenizer.ggml.pre {pre!r}" if model == "gpt2" else f"tokenizer.ggml.model {model!r}"
        warnings.warn(f"{path}: {why} is not known here: no tokenizer.json is made of it", stacklevel=3)
        return result
    special = {}
    for name, key in KEYS.items():
        token = values.get(f"ggml.{key}_token_id")
        if token is not None and token < len(tokens):
            special[name] = tokens[token]
    kinds = values.get("ggml.token_type") or [NORMAL] * len(tokens)
    _add_special(created, tokens, kinds)
    _add_template(created, special, adds_bos, values.get("ggml.add_eos_token", False))
    result["tokenizer.json"] = created.to_str(pretty=True).encode()
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"{name}_token": token for name, token in special.items()}
    names = ("default", *values.get("chat_templates", ()))
    templates: dict[str, str] = {name: text for name in names if (text := values.get(_template_key(name)))}
    if templates.keys() - {"default"}:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif templates:
        result["chat_template.jinja"] = templates["default"].encode()
    result["tokenizer_config.json"] = _json(config)
    ids = {f"{name}_token_id": values.get(f"ggml.{KEYS[name]}_token_id") for name in ("bos", "eos", "pad")}
    if len(ends := _ends(values, tokens, kinds)) > 1:
        ids["eos_token_id"] = ends
    result["generation_config.json"] = _json({name: token for name, token in ids.items() if token is not None})
    return result


def _template_key(name: str) -> str:
    return "chat_template" if name == "default" else f"chat_template.{name}"


def _ends(values: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> list[int]:
    """The token ids that end a text in llama.cpp, the end token first; empty if the file names none."""
    if (eos := values.get("ggml.eos_token_id")) is None:
        return []
    named = [values.get(f"ggml.{key}_token_id") for key in _MORE_ENDS]
    known = [i for i, token in enumerate(tokens) if token in _ENDS and kinds[i] == CONTROL]
    return list(dict.fromkeys(i for i in (eos, *named, *known) if i is not None))


_NAMED = {"name", "template"}  # of one of several templates
_TEXT_KEYS = ("ggml.model", "ggml.pre", "chat_template")
_LISTS: dict[str, type | tuple[type, ...]] = {
    "chat_templates": str,
    "ggml.tokens": str,
    "ggml.merges": str,
    "ggml.token_type": int,
    "ggml.scores": (float, int),
}
_FLAGS = ("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix")
_IDS = tuple(f"ggml.{key}_token_id" for key in (*KEYS.values(), *_MORE_ENDS))
_TOKEN_CHARACTERS, _TOKENS_CHARACTERS = 4096, 64 << 20  # limits for one token, and for all


def _is_list(of: type | tuple[type, ...], value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, of) for item in value)


def _check_types(values: Mapping[str, Any], path: str) -> None:
    """Raises if the metadata have other types or sizes than a tokenizer's."""
    names = values.get("chat_templates", [])
    texts = _TEXT_KEYS + tuple(f"chat_template.{name}" for name in names if isinstance(names, list))
    checks: list[tuple[str, Callable[[Any], bool]]] = [(key, lambda value: isinstance(value, str)) for key in texts]
    checks += [(key, lambda value: type(value) is bool) for key in _FLAGS]
    checks += [(key, lambda value: type(value) is int and 0 <= value < 2**31) for key in _IDS]
    for key, of in _LISTS.items():
        checks.append((key, functools.partial(_is_list, of)))
    for key, is_fine in checks:
        if key in values and not is_fine(values[key]):
            raise UserError(f"{path}: tokenizer.{key} is {limits.shortened(values[key])}: the file is corrupted")
    for key in ("ggml.tokens", "ggml.merges"):
        sizes = [len(text) for text in values.get(key, ())]
        if max(sizes, default=0) > _TOKEN_CHARACTERS or sum(sizes) > _TOKENS_CHARACTERS:
            raise UserError(f"{path}: tokenizer.{key} has texts of {max(sizes):,} characters, {sum(sizes):,} in all")
    if any(" " not in merge for merge in values.get("ggml.merges", ())):
        raise UserError(f"{path}: tokenizer.ggml.merges has one without a space: the file is corrupted")


def _byte_level(values: Mapping[str, Any], pre: Pre, path: str) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in values["ggml.merges"]]
    try:
        model = models.BPE(vocab=_vocab(values), merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{path}: tokenizer.ggml.merges do not fit its tokens ({error}): the file is corrupted"
        ) from None
    created = tokenizers.Tokenizer(model)
    parts = [_splitter(split) for split in pre.splits if split != "gpt2"]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="gpt2" in pre.splits)
    created.pre_tokenizer = pre_tokenizers.Sequence([*parts, bytes_]) if parts else bytes_
    created.decoder = decoders.ByteLevel()
    return created


def _splitter(split: str) -> Any:
    if split == "digits":
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(tokenizers.Regex(split), "isolated")


def _sentencepiece(values: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """llama.cpp joins the pair whose piece has the best score, which equals merging in the order of scores."""
    vocab, tokens = _vocab(values), values["ggml.tokens"]
    kinds, scores = values["ggml.token_type"], values["ggml.scores"]
    unknown = next((token for token, kind in zip(tokens, kinds) if kind == UNKNOWN), None)
    created = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, tokens, kinds, scores),
            byte_fallback=BYTE in kinds,
            fuse_unk=True,
            unk_token=unknown,
        )
    )
    prefix = values.get("ggml.add_space_prefix", True)
    first = [normalizers.Prepend(SPACE)] if prefix else []
    created.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if prefix else []
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    created.decoder = decoders.Sequence(parts)
    return created


def _merges(
    vocab: Mapping[str, int], tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """All pairs of pieces that form a piece, those of the best piece first."""
    result = []
    for piece, kind, score in zip(tokens, kinds, scores):
        if kind not in (NORMAL, USER_DEFINED, UNUSED):
            continue
        for i in range(1, len(piece)):
            left, right = vocab.get(piece[:i]), vocab.get(piece[i:])
            if left is not None and right is not None:
                result.append((-score, vocab[piece], left, right))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(result)]


def _vocab(values: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id, without tokens that only pad the embedding."""
    tokens = values["ggml.tokens"]
    kinds = values.get("ggml.token_type") or [NORMAL] * len(tokens)
    return {token: i for i, token in enumerate(tokens) if not (kinds[i] == UNUSED and token == PADDING.format(i))}


def _add_special(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Marks the tokens that are matched before splitting, and the special ones among them."""
    added = [
        tokenizers.AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, kinds)
        # A user-defined token is matched before spaces are replaced, so one that contains the space mark never matches.
        if kind in (CONTROL, UNKNOWN) or (kind == USER_DEFINED and SPACE not in token)
    ]
    tokenizer.add_tokens(added)


def _add_template(tokenizer: tokenizers.Tokenizer, special: Mapping[str, str], bos: bool, eos: bool) -> None:
    """Sets the tokens that enclose a text."""
    before = [special["bos"]] if bos and "bos" in special else []
    after = [special["eos"]] if eos and "eos" in special else []
    if before or after:
        tokens = [(token, tokenizer.token_to_id(token)) for token in {*before, *after}]
        single, pair = [*before, "$A", *after], [*before, "$A", *after, *before, "$B:1", *after]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


def metadata(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata under "tokenizer.", from a tokenizer's files and the config.json of its model.

    Raises:
      UserError: llama.cpp does not support the tokenizer, or the model has fewer tokens than it.
    """
    if "tokenizer.json" not in files:
        model = files.get("tokenizer.model")
        return {"ggml.model": "no_vocab"} if model is None else _of_sentencepiece(model, files, config)
    tokenizer = added_tokens.of_files(files, "the tokenizer")
    spec = json.loads(tokenizer.to_str())
    model = spec["model"]
    if model.get("type", "BPE") != "BPE":
        raise UserError(f"tokenizer.json has a {model['type']} model, GGUF files support only BPE models")
    added = {token["id"]: token for token in spec.get("added_tokens", ())}
    tokens = {i: token for token, i in model["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    size = config["vocab_size"]
    if tokens and max(tokens) >= size:
        raise UserError(f"vocab_size of config.json ({size}) must be above the tokenizer's last id ({max(tokens)})")
    if _is_byte_level(spec) and not _pairs(spec):  # the gguf package leaves empty lists out, which llama.cpp wants
        warnings.warn(
            "tokenizer.json has no merges, llama.cpp reads none without: the file has no tokenizer", stacklevel=2
        )
        return {"ggml.model": "no_vocab"}
    pieces = _byte_level_pieces(spec) if _is_byte_level(spec) else _sentencepiece_pieces(spec, tokens, size)
    unknown = model.get("unk_token") if pieces["ggml.model"] == "llama" else None
    values: dict[str, Any] = {
        "ggml.tokens": [tokens.get(i, PADDING.format(i)) for i in range(size)],
        "ggml.token_type": [_kind(i, tokens, added, unknown, pieces["ggml.model"]) for i in range(size)],
        **pieces,
    }
    values |= _special(files, config, {token: i for i, token in tokens.items()})
    around = tokenizer.encode("").ids
    values["ggml.add_bos_token"] = bool(around) and around[0] == values.get("ggml.bos_token_id")
    values["ggml.add_eos_token"] = len(around) > values["ggml.add_bos_token"]
    return values


def _of_sentencepiece(data: bytes, files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a SentencePiece model file, as runs have."""
    import sentencepiece

    tokenizer_limits.check_sentencepiece(data, "tokenizer.model")
    model, size = sentencepiece.SentencePieceProcessor(model_proto=data), config["vocab_size"]
    ids = range(len(model))
    if len(model) > size:
        raise UserError(f"vocab_size of config.json ({size}) must be at least the tokenizer's ({len(model)})")
    checks = (
        (UNKNOWN, model.is_unknown),
        (CONTROL, model.is_control),
        (BYTE, model.is_byte),
        (UNUSED, model.is_unused),
    )
    kinds = [next((kind for kind, check in checks if check(i)), NORMAL) for i in ids]
    scores = [model.get_score(i) for i in ids]
    # BPE merges are numbered; a unigram model has log probabilities.
    if any(kind == NORMAL and not score.is_integer() for kind, score in zip(kinds, scores)):
        raise UserError("tokenizer.model is a unigram model, GGUF files support only BPE models")
    if model.normalize(_ODD).lstrip(SPACE) != _ODD.replace(" ", SPACE):
        raise UserError("tokenizer.model changes the text's characters, llama.cpp does not: it has no GGUF form")
    rest = range(len(model), size)
    values: dict[str, Any] = {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": [model.id_to_piece(i) for i in ids] + [PADDING.format(i) for i in rest],
        "ggml.token_type": kinds + [UNUSED] * len(rest),
        "ggml.scores": scores + [0.0] * len(rest),
        "ggml.add_space_prefix": model.encode_as_pieces("a")[0].startswith(SPACE),
    }
    values |= _special(files, config, {model.id_to_piece(i): i for i in ids})
    # Our models' texts begin with it.
    return values | {"ggml.add_bos_token": "ggml.bos_token_id" in values, "ggml.add_eos_token": False}


def _is_byte_level(spec: Mapping[str, object]) -> bool:
    return any(part["type"] == "ByteLevel" for part in _parts(spec, "pre_tokenizer"))


def _parts(spec: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre_tokenizer."""
    whole = spec.get(name)
    if not whole:
        return []
    return whole.get("pretokenizers") or whole.get("normalizers") or [whole] if whole["type"] == "Sequence" else [whole]


def _pairs(spec: Mapping[str, Any]) -> list[list[str]]:
    """The merges; old files store each as one string."""
    return [merge.split(" ", 1) if isinstance(merge, str) else list(merge) for merge in spec["model"]["merges"]]


def _byte_level_pieces(spec: Mapping[str, Any]) -> dict[str, Any]:
    odd = [part["type"] for part in _parts(spec, "normalizer") if part["type"] not in ("NFC",)]
    splits = tuple(_split_of(part) for part in _parts(spec, "pre_tokenizer"))
    splits = tuple(split for split in splits if split)
    ignores = bool(spec["model"].get("ignore_merges"))
    same = (name for name, pre in PRES.items() if splits in (pre.splits, *pre.also) and pre.ignore_merges is ignores)
    name = next(same, None)
    if name is None or odd:
        fault = f"a normalizer {odd[0]}" if odd else f"a pre_tokenizer that splits by {list(splits)}"
        raise UserError(f"tokenizer.json has {fault}, which is none of those known for GGUF: {', '.join(PRES)}")
    return {"ggml.model": "gpt2", "ggml.pre": name, "ggml.merges": [" ".join(pair) for pair in _pairs(spec)]}


def _split_of(part: Mapping[str, object]) -> str | None:
    """The split of a pre_tokenizer's step, in the form of Pre.splits; None: it does not split."""
    match part:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return "gpt2" if part.get("use_regex", True) else None
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"} if not part.get("invert"):
            return _plain(pattern)
        # What no match has is removed, which is nothing: the last alternatives match all that is left.
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True} if (
            pattern.endswith(_SPACES.rpartition("|")[2])
        ):
            return _plain(pattern)
    return f"{part['type']} {json.dumps({key: value for key, value in part.items() if key != 'type'})}"


def _plain(pattern: str) -> str:
    """A regular expression with line ends as escapes, which files also have as characters."""
    return pattern.replace("\r", r"\r").replace("\n", r"\n")


def _sentencepiece_pieces(spec: Mapping[str, object], tokens: Mapping[int, str], size: int) -> dict[str, Any]:
    parts = [part for name in ("normalizer", "pre_tokenizer") for part in _parts(spec, name)]
    steps = [part["type"] for part in parts]
    odd = [step for step in steps if step not in ("Prepend", "Replace", "Metaspace", "Split")]
    replaced = [part["content"] for part in parts if part["type"] == "Replace"]
    odd += ["Replace" for content in replaced if content != SPACE]
    if odd or not {"Replace", "Metaspace"} & set(steps):
        raise UserError(
            f"tokenizer.json prepares text by {', '.join(steps) or 'nothing'}: neither byte-level nor as SentencePiece does "
            "it, it has no GGUF form here"
        )
    metaspace = [part.get("prepend_scheme") != "never" for part in parts if part["type"] == "Metaspace"]
    rank: dict[str, int] = {}
    for left, right in _pairs(spec):
        rank.setdefault(left + right, len(rank))
    last = len(rank)
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.scores": [-float(rank.get(tokens.get(i, ""), last + i)) for i in range(size)],
        "ggml.add_space_prefix": "Prepend" in steps or any(metaspace),
    }


def _kind(
    i: int, tokens: Mapping[int, str], added: Mapping[int, Mapping[str, Any]], unknown: str | None, model: str
) -> int:
    """A token's type in ggml."""
    token = tokens.get(i)
    if token is None:
        return UNUSED
    if token == unknown:
        return UNKNOWN
    if i in added:
        return CONTROL if added[i].get("special") else USER_DEFINED
    if model == "llama" and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return BYTE
    return NORMAL


def _special(files: Mapping[str, bytes], config: Mapping[str, object], ids: Mapping[str, int]) -> dict[str, Any]:
    """The special tokens and the chat template."""
    try:
        tokenizer_config = limits.parse_json(files.get("tokenizer_config.json", b"{}"))
    except ValueError as error:
        raise UserError(f"tokenizer_config.json cannot be read ({limits.cause(error)}): copy it again") from None
    tokenizer_config = tokenizer_config if isinstance(tokenizer_config, dict) else {}
    values: dict[str, Any] = {}
    for name, key in KEYS.items():
        token = tokenizer_config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        result = ids.get(token) if isinstance(token, str) else config.get(f"{name}_token_id")
        result = result[0] if isinstance(result, list) and result else result
        if result is not None:
            values[f"ggml.{key}_token_id"] = result
    more = [i for i in _generation_ends(files) if i != values.get("ggml.eos_token_id")]
    if (message := ids.get("<|eom_id|>")) in more:  # in Llama 3: a tool call follows
        values["ggml.eom_token_id"] = more.pop(more.index(message))
    values |= {
        f"ggml.{key}_token_id": i for key, i in zip(("eot", "eom"), more) if f"ggml.{key}_token_id" not in values
    }
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {
            item["name"]: item["template"] for item in template if isinstance(item, dict) and _NAMED <= item.keys()
        }
    templates = dict(template) if isinstance(template, dict) else {"default": template}
    if "chat_template.jinja" in files:
        templates = {"default": files["chat_template.jinja"].decode("utf-8", "replace")}
    templates = {name: text for name, text in templates.items() if isinstance(text, str) and text}
    values |= {_template_key(name): text for name, text in templates.items()}
    if named := [name for name in templates if name != "default"]:
        values["chat_templates"] = named
    return values


def _generation_ends(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """The end tokens in generation_config.json."""
    name = tokenizer_files.GENERATION_FILE
    try:
        generation_config = limits.parse_json(files.get(name, b"{}"))
    except ValueError as error:
        raise UserError(f"{name} cannot be read ({limits.cause(error)}): copy it again") from None
    return (
        tokenizer_files.ids_of(generation_config.get("eos_token_id"), name)
        if isinstance(generation_config, dict)
        else ()
    )


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
