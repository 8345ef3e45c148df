"""Several templates of a tokenizer are found and chosen as transformers 5.24 saves and chooses them.

It saves chat_template.jinja and additional_chat_templates/NAME.jinja, which take the place of tokenizer_config.json's; with
tools it takes "tool_use" where there is one of that name, else "default".
"""

from __future__ import annotations

import json

import pytest

from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.data.chat.template import ChatTemplate
from capibara.data.chat.template_files import TemplateFiles
from capibara.data.tokenizers import files
from tests.data.tokenizers import kinds

TEXT = "{{ messages[0].content }}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def rendered(folder, tools=None, **options):
    template = ChatTemplate(tokenizer=str(folder), **options)
    return template.render(Conversation([{"role": "user", "content": "a"}], tools), "here").text


def make(folder, default=None, further=None, config=None):
    folder.mkdir()
    kinds.llama_2().save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(special | ({} if config is None else {"chat_template": config}))
    )
    if default:
        (folder / "chat_template.jinja").write_text(default)
    for name, text in (further or {}).items():
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    return folder


def copied(folder, target):
    """The tokenizer as a run folder or a saved model has it."""
    target.mkdir()
    for name, content in files.carried(str(folder)).items():
        (target / name).write_bytes(content)
    return target


CASES = {
    "files": dict(default="D" + TEXT, further={"tool_use": "T" + TEXT, "rag": "R" + TEXT}),
    "files before the configuration": dict(
        default="D" + TEXT, further={"tool_use": "T" + TEXT, "rag": "R" + TEXT}, config="C"
    ),
    "a list": dict(
        config=[{"name": n, "template": t + TEXT} for n, t in (("default", "D"), ("tool_use", "T"), ("rag", "R"))]
    ),
    "a dictionary": dict(config={"default": "D" + TEXT, "tool_use": "T" + TEXT, "rag": "R" + TEXT}),
}


@pytest.mark.parametrize("name", CASES)
def test_templates_are_chosen_by_name_and_tools(tmp_path, name):
    folder = make(tmp_path / "a", **CASES[name])
    for one in (folder, copied(folder, tmp_path / "copy")):
        assert (rendered(one), rendered(one, TOOLS)) == ("Da", "Ta")
        assert rendered(one, name="rag") == rendered(one, TOOLS, name="rag") == "Ra"
        with pytest.raises(UserError, match="known are default"):
            rendered(one, name="none")


def test_one_file_is_the_only_template(tmp_path):
    folder = make(tmp_path / "a", default="D" + TEXT, config={"default": "C", "tool_use": "C"})
    assert (rendered(folder), rendered(folder, TOOLS)) == ("Da", "Da")


def test_without_a_default_a_name_is_needed(tmp_path):
    folder = make(tmp_path / "a", further={"rag": "R" + TEXT})
    with pytest.raises(UserError, match="'default'.* is no template .* known are rag"):
        rendered(folder)
    assert rendered(folder, name="rag") == rendered(copied(folder, tmp_path / "copy"), name="rag") == "Ra"


def test_only_special_tokens_are_spelled_and_not_too_many(tmp_path):
    folder = make(tmp_path / "a", default=TEXT)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    added = [{"id": 900 + i, "content": f"<{i}>", "special": special} for i, special in enumerate((True, False))]
    path.write_text(json.dumps(content | {"added_tokens": added}))
    assert TemplateFiles(str(folder), None).special_tokens == ("</s>", "<0>", "<s>")
    long = [{"id": 900 + i, "content": f"{i}" * (1 << 19), "special": True} for i in range(3)]
    path.write_text(json.dumps(content | {"added_tokens": long}))
    with pytest.raises(UserError, match="special tokens of tokenizer.json have more than 1048576 characters together"):
        _ = TemplateFiles(str(folder), None).special_tokens
