"""Preference training, and masks of answers, as in TRL.

Needs an environment with torch and trl: make test-peer PEER=transformers PEER_PYTHON=PATH/bin/python
"""

import datetime
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import tokenizers
from jax.sharding import SingleDeviceSharding

import capibara as cb
from capibara.core.types import UserError
from capibara.data.chat.conversations import TrainOn, render_example
from capibara.data.chat.formats import Conversation
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.pipeline.examples import Assembler
from capibara.data.sources.sources import StdlibSource
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.models import api

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import reward_folders  # noqa: E402
import test_token_classification  # noqa: E402
import test_trl as ours  # noqa: E402

PYTHON = os.environ.get("TORCH_PYTHON")
PARAMETERS = 2e-5  # of the learning rate 1e-3

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TORCH_PYTHON names no python with torch"),
    pytest.mark.standard_promotion,
]


def peer(what, folder):
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    argv = [PYTHON, str(HERE / "trl_peer.py"), what, str(folder)]
    done = subprocess.run(argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture(scope="module")
def folder(toy_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    shutil.copytree(toy_tokenizer, folder / "tokenizer")
    ours.write_lines(folder)
    (folder / "cases.json").write_text(json.dumps({name: theirs for name, (_, theirs) in ours.LOSSES.items()}))
    peer("train", folder)
    return folder


def of_folder(path):
    foreign = open_model.open_model(str(path))
    model = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    here = SingleDeviceSharding(jax.devices()[0])
    return open_model.load_params(foreign, model, jax.tree.map(lambda _: here, model.abstract_params))


@pytest.mark.parametrize("name", ours.LOSSES)
def test_preferences_are_learned_as_by_trl(name, folder, toy_tokenizer, monkeypatch):
    base = ours.with_scores(name, jax.device_get(of_folder(folder / "base")))  # the steps take its buffers
    got, params = ours.trained(name, base, folder, toy_tokenizer, monkeypatch)
    found = ours.apart(got, json.loads((folder / "found.json").read_text())[name])
    largest = lambda other: max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, other)))  # noqa: E731
    parameters = largest(of_folder(folder / name))
    told = ", ".join(f"{key} {value:.1e}" for key, value in (found | {"parameters": parameters}).items())
    print(f"\n{name}: largest differences to TRL: {told} (moved by {largest(base):.1e})", file=sys.stderr)
    assert ours.too_large(found) == {} and parameters <= PARAMETERS


@pytest.mark.parametrize("model_type", reward_folders.FAMILIES)
def test_reward_models_have_the_scores_of_transformers(model_type, scored):
    folder, want = scored
    np.testing.assert_allclose(reward_folders.scores(folder / model_type), want[model_type], rtol=2e-4, atol=2e-5)


def test_steps_have_the_scores_of_a_token_classification(tmp_path):
    for model_type in reward_folders.FAMILIES:
        reward_folders.write(tmp_path / "ours" / model_type, model_type)
        cb.convert(f"{tmp_path}/ours/{model_type}", f"{tmp_path}/theirs/{model_type}", format="hf_token_classification")
    (tmp_path / "theirs" / "ids.json").write_text(json.dumps(reward_folders.TEXTS))
    peer("token_scores", tmp_path / "theirs")
    logits = json.loads((tmp_path / "theirs" / "token_scores.json").read_text())  # as committed
    for model_type in reward_folders.FAMILIES:
        test_token_classification.check_scores(tmp_path / "ours" / model_type, logits[model_type])


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    for model_type in reward_folders.FAMILIES:
        reward_folders.write(folder / model_type, model_type)
    (folder / "ids.json").write_text(json.dumps(reward_folders.TEXTS))
    peer("scores", folder)
    return folder, json.loads((folder / "scores.json").read_text())


# The beginning and the end of a text in each template, and more special tokens.
CHAT = {
    "gemma": ("<bos>", "<eos>", "<start_of_turn> <end_of_turn>"),
    "gemma3": ("<bos>", "<eos>", "<start_of_turn> <end_of_turn>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|> <|end_header_id|>"),
    "phi3": ("<s>", "<|endoftext|>", "<|system|> <|user|> <|assistant|> <|end|>"),
    "phi3_5": ("<s>", "<|endoftext|>", "<|system|> <|user|> <|assistant|> <|end|>"),
    "qwen2_5": (None, "<|im_end|>", "<|im_start|> <|endoftext|>"),
    "qwen3": (None, "<|im_end|>", "<|im_start|> <|endoftext|>"),
    "qwen3_instruct_2507": (None, "<|im_end|>", "<|im_start|> <|endoftext|>"),
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>", "<|im_start|>"),
    "deepseekv3": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜> <｜Assistant｜>"),
    "gptoss": ("<|startoftext|>", "<|return|>", "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|>"),
    "glm4moe": (None, "<|endoftext|>", "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"),
}
QUESTIONS = ("What is 2+2?", "And 3+3?")


def chat(*answers):
    turns = zip(QUESTIONS, answers)
    return [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn)]


CONVERSATIONS = {"one": chat("Hello."), "two": chat("It is 4.", "6,\n\n of course (é)!")}
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
# Channels: the last turn's reasoning, and tool calls.
OF_TEMPLATE = {
    "gptoss": {
        "thoughts": [message | ({"thinking": "Sums."} if n % 2 else {}) for n, message in enumerate(chat("4.", "6."))],
        "calls": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "thinking": "A tool adds.", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "name": "add", "content": "4"},
            {"role": "assistant", "thinking": "It said 4.", "content": "It is 4."},
        ],
    }
}
# Unmarked templates whose ids and masks equal TRL's, even for two answers.
EQUAL = ("gemma", "gemma3", "llama3", "phi3", "phi3_5", "qwen3_instruct_2507", "cohere", "lfm2")
REFUSED = ("deepseekv3", "glm4moe")  # their prompts or turn ends are not a prefix of the text


@pytest.fixture(scope="module")
def chats(toy_tokenizer, tmp_path_factory):
    """A tokenizer's folder for each template, and TRL's result for the conversations."""
    folder = tmp_path_factory.mktemp("chats")
    for name, (bos, eos, more) in CHAT.items():
        tokenizer = tokenizers.Tokenizer.from_file(f"{toy_tokenizer}/tokenizer.json")
        tokenizer.add_special_tokens([*([bos] if bos else []), eos, *more.split()])
        (folder / name).mkdir()
        tokenizer.save(str(folder / name / "tokenizer.json"))
        (folder / name / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": eos}))
    asked = {name: ends[:2] for name, ends in CHAT.items()}
    asked = {"templates": asked, "conversations": CONVERSATIONS, "of_template": OF_TEMPLATE}
    (folder / "asked.json").write_text(json.dumps(asked))
    peer("masks", folder)
    return folder, json.loads((folder / "masks.json").read_text())


def masked(folder, messages, **options):
    """Our ids of a conversation, and which of them have loss."""
    today = datetime.date.today().isoformat()  # transformers puts it into the prompt
    template = ChatTemplate(tokenizer=str(folder), date=today, **options)
    vocabulary = TokenizerJsonVocabulary(path=str(folder))
    example = render_example(template, Conversation(messages, None), TrainOn.ASSISTANT, "a.jsonl:1")
    dataset = Dataset(source=StdlibSource(), vocabulary=vocabulary, length=4096)
    document = Assembler(dataset, adds_end=True).conversation(example, (0,))
    return [document.previous, *document.ids.tolist()], [0, *map(int, document.weights.tolist())]


def said(folder, ids, mask):
    """The text of each run of ids with loss."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    runs = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run], skip_special_tokens=False) for counts, run in runs if counts]


@pytest.mark.parametrize("which", CONVERSATIONS)
@pytest.mark.parametrize("name", CHAT)
def test_marked_templates_have_the_mask_of_trl(name, which, chats):
    """TRL's templates for training, which mark the assistant's text."""
    folder, want = chats[0] / name, chats[1][name][which]
    found = masked(folder, CONVERSATIONS[which], template=str(folder / "training.jinja"))
    assert found == (want["input_ids"], want["assistant_masks"])


@pytest.mark.parametrize(("name", "which"), [(name, which) for name, more in OF_TEMPLATE.items() for which in more])
def test_channels_have_the_mask_of_trl(name, which, chats):
    folder, want, messages = chats[0] / name, chats[1][name][which], OF_TEMPLATE[name][which]
    found = masked(folder, messages, template=str(folder / "training.jinja"))
    assert found == (want["input_ids"], want["assistant_masks"])
    ids, mask = masked(folder, messages, end_of_turn="<|end|>")
    theirs = [
        text.removeprefix("<|start|>assistant") for text in said(folder, want["input_ids"], want["assistant_masks"])
    ]
    assert ids == want["input_ids"] and said(folder, ids, mask) == theirs


@pytest.mark.parametrize("which", CONVERSATIONS)
@pytest.mark.parametrize("name", CHAT)
def test_unmarked_templates_have_the_mask_of_trl(name, which, chats):
    """The original templates, with the loss on turn ends; each known difference is named."""
    folder, want = chats[0] / name, chats[1][name][which]
    messages = CONVERSATIONS[which]
    if name in REFUSED:
        with pytest.raises(UserError, match="generation|no special token ends"):
            masked(folder, messages, after_turn="all")
        return
    more = {"end_of_turn": "<|end|>"} if name == "gptoss" else {}
    ids, mask = masked(folder, messages, after_turn="all", **more)
    theirs = said(folder, want["input_ids"], want["assistant_masks"])
    if name == "qwen2_5":  # TRL trains the line break that its own generation prompt ends with
        assert ids == want["input_ids"]
        theirs = [text.removeprefix("\n") for text in theirs]
    elif name == "gptoss":  # TRL trains the generation prompt, too
        assert ids == want["input_ids"]
        theirs = [text.removeprefix("<|start|>assistant") for text in theirs]
    elif name == "qwen3" and which == "two":  # TRL gives every answer a thought; the template only the last one
        theirs = [theirs[0].removeprefix("<think>\n\n</think>\n\n"), *theirs[1:]]
    else:
        assert name in EQUAL or which == "one"
        assert (ids, mask) == (want["input_ids"], want["assistant_masks"])
    assert said(folder, ids, mask) == theirs
