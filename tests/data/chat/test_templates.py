"""The assistant's tokens under real chat templates: those that have loss, decoded, are what the assistant said."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import random

import pytest

from capibara.core.types import UserError
from capibara.data.chat.conversations import TrainOn, render_example
from capibara.data.chat.formats import Conversation
from capibara.data.chat.mask import assistant_ranges
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.pipeline.examples import Assembler
from capibara.data.sources.sources import StdlibSource
from capibara.data.tokenizers.vocabulary import GUARD, TokenizerJsonVocabulary

QUESTIONS = [("What is 2+2?", "It is 4."), ("And 3+3?", "6,\n\n  of course  (é, 漢字)!"), (" so ", "?")]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


def plain(system: str | None = None) -> list[dict]:
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in QUESTIONS:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def with_tools() -> list[dict]:
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12 degrees", "tool_call_id": "abcdefgh1"},
        {"role": "assistant", "content": "It is cool."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Bye"},
    ]


def thinking() -> list[dict]:
    """The reasoning of the first answer is dropped by Qwen3's template: a question comes after it."""
    *most, last = with_tools()
    most[1]["content"] = "<think>\nA tool.\n</think>\n\nLet me look."
    most[3]["reasoning_content"] = "Warm?"
    return [*most, {**last, "content": "<think>\nEnd.\n</think>\n\nBye"}]


@dataclasses.dataclass
class Tokens:
    """A conversation as the model has it."""

    ids: list[int]
    said: list[str]  # of each run of tokens with loss the text
    whole: str


def tokens_of(folder: str, messages, tools=None, train_on=TrainOn.ASSISTANT, **options) -> Tokens:
    template = ChatTemplate(tokenizer=folder, **options)
    example = render_example(template, Conversation(messages, tools), train_on, "a.jsonl:1")
    vocabulary = TokenizerJsonVocabulary(path=folder)
    dataset = Dataset(source=StdlibSource(), vocabulary=vocabulary, length=4096)
    document = Assembler(dataset, adds_end=True).conversation(example, (0,))

    def text(ids):
        return vocabulary.tokenizer.decode(ids, skip_special_tokens=False)

    ids = document.ids.tolist()
    runs = itertools.groupby(zip(ids, document.weights.tolist(), strict=True), key=lambda pair: pair[1])
    said = [text([i for i, _ in run]) for weight, run in runs if weight == 1]
    return Tokens(ids, said, text([document.previous, *ids]))


STRIPPED = [answer.strip() for _, answer in QUESTIONS]
ENDED = {
    "smollm2": "{}<|im_end|>",
    "llama2": " {} </s>",
    "llama3.1": "{}<|eot_id|>",
    "mistral": " {}</s>",
    "gemma": "{}<end_of_turn>",
    "phi3": "{}<|end|>",
    "qwen2.5": "{}<|im_end|>",
    "zephyr": "{}</s>",
    "generation": "{}<|im_end|>",
}


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("name", ENDED)
def test_what_the_assistant_says_carries_loss_and_nothing_else(tokenizer_folder, name, system):
    if name == "gemma" and system:
        pytest.skip("the template has no system messages")
    found = tokens_of(tokenizer_folder(name), plain(system))
    assert found.said == [ENDED[name].format(answer) for answer in STRIPPED]
    last = tokens_of(tokenizer_folder(name), plain(system), train_on=TrainOn.LAST)
    assert last.said == found.said[-1:] and last.ids == found.ids


@pytest.mark.parametrize(("name", "more"), [("qwen2.5", "\n"), ("zephyr", "\n"), ("llama3.1", ""), ("mistral", "")])
def test_the_line_break_after_a_turn_is_said_where_it_is_asked_for(tokenizer_folder, name, more):
    found = tokens_of(tokenizer_folder(name), plain(), after_turn="newline")
    assert found.said == [ENDED[name].format(answer) + more for answer in STRIPPED]


# As trl 1.16 marks them in its templates for training (tests/interop/test_transformers_trl.py compares them id by id).
MARKED_BY_TRL = {
    "gemma": ("{}<end_of_turn>\n", ""),
    "llama3.1": ("{}<|eot_id|>", ""),
    "phi3": ("{}<|end|>", "<|endoftext|>"),  # whose token takes the line break along
    "qwen2.5": ("{}<|im_end|>\n", ""),
}


@pytest.mark.parametrize("name", MARKED_BY_TRL)
def test_all_that_follows_a_turn_is_said_where_it_is_asked_for(tokenizer_folder, name):
    found = tokens_of(tokenizer_folder(name), plain(), after_turn="all")
    turn, end = MARKED_BY_TRL[name]
    *most, last = [turn.format(answer) for answer in STRIPPED]
    assert found.said == [*most, last + end]


def test_qwen3_writes_an_empty_thought_into_the_last_answer(tokenizer_folder):
    """The generation prompt does not have it, so the model is to say it."""
    found = tokens_of(tokenizer_folder("qwen3"), plain())
    assert found.said == [*(f"{a}<|im_end|>" for a in STRIPPED[:2]), "<think>\n\n</think>\n\n?<|im_end|>"]
    prompted = tokens_of(tokenizer_folder("qwen3"), plain()[:2], variables={"enable_thinking": False})
    assert prompted.said == ["It is 4.<|im_end|>"]


def test_a_record_gives_the_template_its_variables(tokenizer_folder):
    """In the text, and where the assistant's part of it is found: with its own prompt, thoughts are the prompt's."""
    template = ChatTemplate(tokenizer=tokenizer_folder("qwen3"), variables={"enable_thinking": True})
    said = {}
    for value in (None, {"enable_thinking": False}):
        example = render_example(template, Conversation(plain()[:2], None, value), TrainOn.ASSISTANT, "a:1")
        said[bool(value)] = "".join(example.text[first:last] for first, last in example.loss)
    assert said == {False: "<think>\n\n</think>\n\nIt is 4.<|im_end|>", True: "It is 4.<|im_end|>"}
    written = "{{ documents[0] }}{{ messages[0].content }}"
    template = ChatTemplate(tokenizer=tokenizer_folder("qwen3"), template=written)
    assert template.render(Conversation(plain()[:1], None, {"documents": ["d"]}), "a:1").text.startswith("d")
    with pytest.raises(
        UserError, match="a:1 has 'document' for the chat template .*, which asks for documents: .* did you mean"
    ):
        template.render(Conversation(plain()[:1], None, {"document": "d"}), "a:1")
    with pytest.raises(UserError, match="has 'messages' for the chat template .*, which asks for documents"):
        template.render(Conversation(plain()[:1], None, {"messages": []}), "a:1")


CALL = '{"name": "get_weather", "arguments": {"city": "Köln"}}'
CALLED = {
    "llama3.1": [
        '{"name": "get_weather", "parameters": {"city": "Köln"}}<|eot_id|>',
        "It is cool.<|eot_id|>",
        "Bye<|eot_id|>",
    ],
    "mistral": [f'[TOOL_CALLS] [{CALL[:-1]}, "id": "abcdefgh1"}}]</s>', " It is cool.</s>", " Bye</s>"],
    "qwen2.5": [f"<tool_call>\n{CALL}\n</tool_call><|im_end|>", "It is cool.<|im_end|>", "Bye<|im_end|>"],
    "qwen3": [
        f"<tool_call>\n{CALL}\n</tool_call><|im_end|>",
        "It is cool.<|im_end|>",
        "<think>\n\n</think>\n\nBye<|im_end|>",
    ],
    "generation": [f"\n<tool_call>{CALL}</tool_call><|im_end|>", "It is cool.<|im_end|>", "Bye<|im_end|>"],
}


@pytest.mark.parametrize("name", CALLED)
def test_tool_calls_are_what_the_assistant_says(tokenizer_folder, name):
    found = tokens_of(tokenizer_folder(name), with_tools(), TOOLS)
    assert found.said == CALLED[name]
    last = tokens_of(tokenizer_folder(name), with_tools(), TOOLS, train_on=TrainOn.LAST)
    assert last.said == CALLED[name][-1:] and last.ids == found.ids


def test_reasoning_that_the_template_drops_is_not_learned(tokenizer_folder):
    found = tokens_of(tokenizer_folder("qwen3"), thinking(), TOOLS)
    assert found.said == [
        f"Let me look.\n<tool_call>\n{CALL}\n</tool_call><|im_end|>",
        "It is cool.<|im_end|>",
        "<think>\nEnd.\n</think>\n\nBye<|im_end|>",
    ]
    assert "A tool." not in found.whole and "Warm?" not in found.whole
    until_question = tokens_of(tokenizer_folder("qwen3"), thinking()[:4], TOOLS)
    assert until_question.said == [
        f"<think>\nA tool.\n</think>\n\nLet me look.\n<tool_call>\n{CALL}\n</tool_call><|im_end|>",
        "<think>\nWarm?\n</think>\n\nIt is cool.<|im_end|>",
    ]


def test_several_results_and_calls(tokenizer_folder):
    messages = with_tools()
    calls = [{**messages[1]["tool_calls"][0], "id": f"abcdefgh{i}"} for i in range(2)]
    messages[1:3] = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "12", "tool_call_id": "abcdefgh0"},
        {"role": "tool", "content": "13", "tool_call_id": "abcdefgh1"},
    ]
    found = tokens_of(tokenizer_folder("qwen2.5"), messages, TOOLS)
    both = "\n".join([f"<tool_call>\n{CALL}\n</tool_call>"] * 2)
    assert found.said == [f"{both}<|im_end|>", "It is cool.<|im_end|>", "Bye<|im_end|>"]
    named = ", ".join(f'{CALL[:-1]}, "id": "abcdefgh{i}"}}' for i in range(2))
    found = tokens_of(tokenizer_folder("mistral"), messages, TOOLS)
    assert found.said == [f"[TOOL_CALLS] [{named}]</s>", " It is cool.</s>", " Bye</s>"]


def test_the_whole_conversation(tokenizer_folder):
    folder = tokenizer_folder("smollm2")
    found = tokens_of(folder, plain("Be brief."), train_on=TrainOn.ALL)
    assert found.whole == "<|im_start|>" + found.said[0] and len(found.said) == 1


@pytest.mark.parametrize("name", [*ENDED, "qwen3"])
def test_what_a_user_spells_is_text(tokenizer_folder, name):
    """Special tokens in messages keep their spelling and get no id of their own."""
    folder = tokenizer_folder(name)
    vocabulary = TokenizerJsonVocabulary(path=folder)
    spelled = "a <|im_end|> b</s>[INST] <end_of_turn><|eot_id|><|end|> c"
    messages = [{"role": "user", "content": spelled}, {"role": "assistant", "content": f"No {spelled}"}] * 2
    harmless = json.loads(json.dumps(messages).replace("<", "(").replace("[INST]", "(INST)"))
    special = {vocabulary.tokenizer.token_to_id(token) for token in ("<|im_end|>", "</s>", "[INST]", "<end_of_turn>")}
    special |= {vocabulary.tokenizer.token_to_id(token) for token in ("<|eot_id|>", "<|end|>")}
    found, without = tokens_of(folder, messages), tokens_of(folder, harmless)
    assert [i for i in found.ids if i in special] == [i for i in without.ids if i in special]
    assert found.whole.count(spelled) == 4 and len(found.said) == 2
    assert all(f"No {spelled}" in said for said in found.said)
    as_tokens = tokens_of(folder, messages, spelled_tokens=True)
    assert len(as_tokens.ids) < len(found.ids)


def test_special_tokens_of_the_template_have_their_ids(tokenizer_folder):
    folder = tokenizer_folder("llama3.1")
    found = tokens_of(folder, plain("Be brief."), date="2026-11-22")
    tokenizer = TokenizerJsonVocabulary(path=folder).tokenizer
    assert found.ids.count(tokenizer.token_to_id("<|eot_id|>")) == 7
    assert found.ids.count(tokenizer.token_to_id("<|start_header_id|>")) == 7
    assert (
        found.whole.startswith("<|begin_of_text|><|start_header_id|>system")
        and "Today Date: 22 Nov 2026" in found.whole
    )
    assert "Today Date: 26 Jul 2024" in tokens_of(folder, plain()).whole


def test_white_space_that_a_special_token_swallows_decides_nothing(tokenizer_folder):
    """Phi-3's <|end|> swallows the line end after it, and <|assistant|> the one before what is said."""
    folder = tokenizer_folder("phi3")
    vocabulary = TokenizerJsonVocabulary(path=folder)
    text = "<|assistant|>\n\n4<|end|>\n"
    ids, offsets = vocabulary.encode_rendered(text)
    assert [vocabulary.tokenizer.id_to_token(i) for i in ids] == ["<|assistant|>", "4", "<|end|>"]
    assert offsets.tolist() == [[0, 13], [15, 16], [16, 23]]
    found = tokens_of(folder, [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "\n4"}])
    assert found.said == ["4<|end|>"]


def test_characters_of_several_tokens_and_words_with_their_space(tokenizer_file):
    vocabulary = TokenizerJsonVocabulary(path=str(tokenizer_file))
    text = "It is 漢<|im_end|> is"
    ids, offsets = vocabulary.encode_rendered(text)
    assert vocabulary.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
    pieces = [vocabulary.tokenizer.id_to_token(i) for i in ids]
    starts = offsets[:, 0]
    at = pieces.index("<|im_end|>")
    assert starts[at] == 7 and starts[at - 3 : at].tolist() == [6, 6, 6], "three bytes of one character"
    assert starts[at + 1] == 17, "the space before a word is its token's first character"


CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            CHATML.replace("<|im_end|>", "") + PROMPT,
            r"no special token ends message 1, .* set ChatTemplate.end_of_turn",
        ),
        (
            CHATML + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
            r"of message 1 cannot be located \(the generation prompt is .*<think>.* mark the assistant's text with",
        ),
        (
            CHATML.replace("m.content", "(m.content if m.role == 'user' else m.content | upper)") + PROMPT,
            r"message 1 cannot be located \(the text has 'IT IS 4.' instead\)",
        ),
        (
            CHATML.replace("m.content", "(m.content if m.role == 'user' else '')") + PROMPT,
            r"message 1 cannot be located \(the template omits it\)",
        ),
        ("{% for m in messages[::-1] %}" + CHATML.partition("%}")[2] + PROMPT, r"message 1 cannot be located"),
        (CHATML + "{{ messages[-1].content }}" + PROMPT, r"before it is 1 times in the text, 2 times in its prompt"),
        (CHATML + "{% generation %}{% endgeneration %}", r"blocks are empty: put them around"),
        (
            CHATML.replace("+ m.content +", "}}{% generation %}{{ m.content }}{% endgeneration %}{{"),
            r"block ends before the end of the turn, which is '<|im_end|>.* move {% endgeneration %} behind it",
        ),
        ("{% for m in messages %}\n{{ m.content.nothing() }}\n{% endfor %}", r"jinja:2 fails for a.jsonl:1: .*nothing"),
        ("{{ bos_token }}\n{{ raise_exception('no\nway') }}", r"chat_template.jinja:2 fails for a.jsonl:1: no way$"),
        ("\n\n{% for %}", r"chat_template.jinja:3 is no Jinja template"),
        ("{{ messages.__class__.__mro__ }}", r"jinja:1 fails for a.jsonl:1: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", r"jinja:1 fails for a.jsonl:1: access to attribute 'append'"),
    ],
)
def test_templates_that_do_not_tell_are_refused(tokenizer_folder, template, message):
    folder = tokenizer_folder("bad", template)
    with pytest.raises(UserError, match=message) as caught:
        tokens_of(folder, plain())
    assert "\n" not in str(caught.value) and "a.jsonl:1" in str(caught.value) or "is no Jinja" in message


def test_a_template_without_tool_calls(tokenizer_folder):
    with pytest.raises(UserError, match="a.jsonl:1: the template omits the tool calls of message 1: set ChatTemplate"):
        tokens_of(tokenizer_folder("smollm2"), with_tools(), TOOLS)


def test_an_end_of_turn_that_is_no_special_token(tokenizer_folder):
    folder = tokenizer_folder(
        "alpaca",
        "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n###END\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}",
    )
    found = tokens_of(folder, plain()[:4], end_of_turn="###END")
    assert found.said == [f"{answer}\n###END" for answer in STRIPPED[:2]]


def test_channels_and_turns_that_end_otherwise_than_the_last(tokenizer_folder):
    """As gpt-oss has it: thoughts in a channel of their own, of the last turn alone, which has another end."""
    folder = tokenizer_folder(
        "channels",
        "{% for m in messages %}{% set last = loop.last and not add_generation_prompt %}{{ '<|im_start|>' + m.role }}"
        "{% if m.role == 'assistant' and last and m.thinking %}"
        "{{ ' thinks:' + m.thinking + '<|end|><|im_start|>assistant' }}{% endif %}"
        "{{ ' says:' + m.content + ('<|eot_id|>' if m.role == 'assistant' and last else '<|end|>') }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}",
    )
    messages = plain()[:4]
    for number in (1, 3):
        messages[number]["thinking"] = f"thought {number}"
    with pytest.raises(
        UserError, match="no special token ends message 1, the text has .* set ChatTemplate.end_of_turn"
    ):
        tokens_of(folder, messages)
    last = f" thinks:thought 3<|end|><|im_start|>assistant says:{STRIPPED[1]}<|eot_id|>"
    assert tokens_of(folder, messages, train_on=TrainOn.LAST).said == [last]
    found = tokens_of(folder, messages, end_of_turn="<|end|>")
    assert found.said == [f" says:{STRIPPED[0]}<|end|>", last]
    assert "thought 1" not in found.whole


def test_generation_blocks_in_the_messages_that_count(tokenizer_folder):
    template = (
        "{% for m in messages %}{% set text %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>"
        "{% endif %}{% endset %}{{ m.role + ': ' + text }}{% endfor %}"
    )
    folder = tokenizer_folder("marked", template)
    # The space of the prompt is in one token with the first word.
    assert tokens_of(folder, plain()).said == [
        " It is 4.<|im_end|>",
        *(f"{answer}<|im_end|>" for answer in STRIPPED[1:]),
    ]
    messages = plain()
    messages[1]["weight"] = 0
    assert tokens_of(folder, messages).said == [f"{answer}<|im_end|>" for answer in STRIPPED[1:]]
    assert tokens_of(folder, messages, train_on=TrainOn.LAST).said == ["?<|im_end|>"]


def test_ranges_are_of_the_chosen_messages(tokenizer_folder):
    template = ChatTemplate(tokenizer=tokenizer_folder("smollm2"))
    conversation = Conversation(plain(), None)
    rendered = template.render(conversation, "a.jsonl:1")
    ranges = assistant_ranges(template, conversation, rendered, [1, 5], "a.jsonl:1")
    assert [rendered.text[first:last] for first, last in ranges] == ["It is 4.<|im_end|>", "?<|im_end|>"]


def test_white_space_around_what_is_said_and_characters_that_are_none(tokenizer_folder):
    messages = [{"role": "user", "content": " q\n"}, {"role": "assistant", "content": "\n a \ud800\ufdd1\n"}] * 2
    assert tokens_of(tokenizer_folder("smollm2"), messages).said == ["\n a \n<|im_end|>"] * 2
    assert tokens_of(tokenizer_folder("llama3.1"), messages).said == ["a<|eot_id|>"] * 2
    assert tokens_of(tokenizer_folder("generation"), messages).said == ["\n a \n<|im_end|>"] * 2
    silent = [messages[0], {"role": "assistant", "content": ""}, messages[0], {"role": "assistant", "content": " "}]
    assert tokens_of(tokenizer_folder("smollm2"), silent).said == ["<|im_end|>", " <|im_end|>"]
    assert tokens_of(tokenizer_folder("gemma"), silent).said == ["<end_of_turn>"] * 2


def test_a_conversation_that_the_assistant_begins(tokenizer_folder):
    with pytest.raises(UserError, match="a.jsonl:1 begins with a message of the assistant"):
        tokens_of(tokenizer_folder("zephyr"), plain()[1:])


def test_where_templates_are_found(tokenizer_folder, tmp_path, tokenizer_file):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    talk = Conversation([{"role": "user", "content": "x"}], None)

    def text(conversation=talk, **options):
        return ChatTemplate(tokenizer=str(folder), **options).render(conversation, "a:1").text

    with pytest.raises(UserError, match="has no chat template .*: set ChatTemplate.template"):
        text()
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "one {{ eos_token }}", "eos_token": "</s>"}))
    assert text() == "one </s>"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert text() == "d" and text(talk._replace(tools=TOOLS)) == "t" and text(name="tool_use") == "t"
    with pytest.raises(UserError, match=r"ChatTemplate.name \('x'\) is no template of .*: known are default, tool_use"):
        text(name="x")
    (folder / "chat_template.jinja").write_text("file")
    assert text() == "file" == ChatTemplate(tokenizer=str(folder / "tokenizer.json")).render(talk, "a:1").text
    (folder / "mine.jinja").write_text("mine")
    assert text(template=str(folder / "mine.jinja")) == "mine"
    assert text(template="{{ answer }}{{ messages[0].content }}", variables={"answer": 42}) == "42x"
    assert text(template="{{ eos_token }}", variables={"eos_token": "mine"}) == "mine"
    settings.unlink()
    assert text(template="{{ eos_token }}", variables={"eos_token": "<end>"}) == "<end>"
    with pytest.raises(
        UserError, match="asks for eos_token, and there is no tokenizer_config.json .*: set ChatTemplate.var"
    ):
        text(template="{{ eos_token }}")
    with pytest.raises(UserError, match="ChatTemplate.template .*none.jinja.* cannot be read"):
        text(template=str(folder / "none.jinja"))
    with pytest.raises(UserError, match="ChatTemplate.tokenizer .* has no tokenizer.json: name a tokenizer's folder"):
        ChatTemplate(tokenizer=str(tmp_path)).render(talk, "a:1")
    with pytest.raises(UserError, match="ChatTemplate.date .* must be a day: try"):
        ChatTemplate(tokenizer=str(folder), date="today")


def test_json_is_written_as_it_is(tokenizer_folder):
    template = "{{ messages[0] | tojson }}|{{ tools | tojson(indent=1) }}|{% for i in [1, 2] %}{% break %}{% endfor %}"
    folder = tokenizer_folder("json", template)
    talk = Conversation([{"role": "user", "content": "<a> & 'é'"}], [{"name": "f"}])
    text = ChatTemplate(tokenizer=folder).render(talk, "a:1").text
    assert text == '{"role": "user", "content": "<a> & \'é\'"}|[\n {\n  "name": "f"\n }\n]|'


def test_other_vocabularies_cannot_read_templates():
    from capibara.data.tokenizers.vocabulary import ByteVocabulary

    with pytest.raises(UserError, match="ByteVocabulary.* use @TokenizerJsonVocabulary"):
        ByteVocabulary().encode_rendered("x")


def spaces_as_marks(kind: str):
    """A tokenizer that writes spaces as ▁, as Llama 2 does: by its normalizer, or before it cuts text into words."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fallback = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *fallback])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.train_from_iterator("It is 4. [INST] What is 2+2? [/INST] 6, of course".split() * 5, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


@pytest.mark.parametrize("kind", ["normalizer", "pre_tokenizer"])
@pytest.mark.parametrize("name", ["llama2", "zephyr"])
def test_tokenizers_that_mark_spaces(tokenizer_folder, tmp_path, kind, name):
    text = pathlib.Path(tokenizer_folder(name), "chat_template.jinja").read_text()
    spaces_as_marks(kind).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (tmp_path / "chat_template.jinja").write_text(text)
    messages = plain()
    messages[2]["content"] += "</s> <s>"
    template = ChatTemplate(tokenizer=str(tmp_path))
    example = render_example(template, Conversation(messages), TrainOn.ASSISTANT, "a.jsonl:1")
    vocabulary = TokenizerJsonVocabulary(path=str(tmp_path))
    document = Assembler(Dataset(source=StdlibSource(), vocabulary=vocabulary), adds_end=True).conversation(
        example, (0,)
    )
    ids, weights = document.ids, document.weights
    assert (weights[ids == vocabulary.eos_id] == 1).sum() == 3, "one end a turn, none that the user spelled"
    said = ids[(weights == 1) & (ids != vocabulary.eos_id)]
    assert vocabulary.decode(said).replace(" ", "") == "".join(STRIPPED).replace(" ", "")
    assert "</s> <s>" in vocabulary.decode(ids)


WORDS = [
    "a",
    "assistant",
    "user",
    "\n",
    "  ",
    "9",
    "<|im_end|>",
    "</s>",
    "[/INST]",
    " ",
    "}}]",
    "é",
    "model\n",
    "<|end|>\n",
]
WORDS += ["<|im_start|>assistant\n", "<think>", "</think>", '{"x": 1}', "Qz1000000qYw1000000"]


@pytest.mark.parametrize("name", ENDED)
def test_whatever_is_said(tokenizer_folder, name):
    """Conversations made of what is hard to tell from a template's own text, and that repeat themselves."""
    rng = random.Random(0)
    template = ChatTemplate(tokenizer=tokenizer_folder(name))
    strips = name in ("llama2", "llama3.1", "mistral", "gemma")

    def text():
        return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, 5)))

    for _ in range(100):
        again = text()
        messages = [
            {"role": role, "content": rng.choice([again, text()])}
            for _ in range(rng.randint(1, 3))
            for role in ("user", "assistant")
        ]
        example = render_example(template, Conversation(messages), TrainOn.ASSISTANT, "a.jsonl:1")
        answers = [message["content"] for message in messages[1::2]]
        expected = [ENDED[name].format(answer.strip() if strips else answer) for answer in answers]
        assert [example.text[a:b].replace(GUARD, "") for a, b in example.loss] == expected
