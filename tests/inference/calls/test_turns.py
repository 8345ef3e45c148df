"""Turns with calls and thoughts are read as they were written: by small templates of each form, and by those of models.

    CALLS_PYTHON=PATH/bin/python CHAT_TEMPLATES=FOLDER python -m pytest tests/inference/calls/test_turns.py -s

renders the dialogues with the .jinja files below the folder by transformers, and by mistral-common and openai-harmony
where that python has them, and prints a table. The folder is models/templates of llama.cpp, examples of vLLM (their source
distributions have both) and chat_templates of TRL.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import subprocess

import pytest

from capibara.inference.calls.forms import table
from tests.inference.calls import turns
from tests.inference.calls.dialogues import DIALOGUES, message
from tests.inference.calls.family_templates import TEMPLATES, render

HERE = pathlib.Path(__file__).parent
PYTHON, FOLDER = os.environ.get("CALLS_PYTHON"), os.environ.get("CHAT_TEMPLATES")
# What a template does not write as it was given, of transformers 5.24, llama.cpp and vLLM as of November 2026.
LOSSY = {
    "Apriel-1.6": {3, 6, 7, 9, 12},  # leaves out what begins a thought, which its prompt has
    "NVIDIA-Nemotron-Nano-v2": {8, 9, 11},  # begins another turn for calls
    "lfm2_2_5.jinja": {15, 16}, "lfm2_2_5_v2.jinja": {15, 16}, "LFM2.5-8B": {15, 16},  # strings with quotes in quotes
    "R1-Distill-Qwen": set(range(4, 27)),  # an answer follows the calls in another turn
    "llama4_json": {8, 9, 11}, "llama4_pythonic": {8, 9, 11, 15, 18, 25},  # text right before a bare call; unescaped strings
    "gemma3_pythonic": set(range(27)), "llama3.2_pythonic": set(range(27)), "toolace": set(range(27)),  # no commas, no quotes
    "mistral_parallel": set(range(27)), "deepseekv31": set(range(27)), "granite_20b": set(range(27)),  # other prompts for an answer
    "phi4_mini": set(range(4, 27)),  # calls as Python's dicts, without a marker
    "firefunction": set(range(27)), "step5": set(range(27)),  # an end that belongs to the next turn
    "command-r-plus": {13},  # Jinja's indent takes U+2028 for a line break
    "MiniMax-M3": {18, 20, 21},  # leaves out null; an empty list in a list without a schema
}  # fmt: skip
# What a form cannot say: an empty list in a list without a schema is an empty element, as an empty text is.
UNWRITTEN = {"minimax m3": {20}}


def test_each_form_has_a_template():
    assert set(TEMPLATES) == {form.name for form in table.FORMS}


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_of_each_form_are_read_as_they_were_written(name):
    template, tokens = TEMPLATES[name]
    dialect = turns.dialect_of(turns.Model(template, tokens))
    assert dialect.form is not None and dialect.form.name == name
    for index in set(range(len(DIALOGUES))) - UNWRITTEN.get(name, set()):
        turn = render(template, message(index))
        assert turns.mistakes(dialect, index, len(DIALOGUES[index][2]), "", turn) == []


def test_a_turn_that_is_read_otherwise_is_told():
    template, tokens = TEMPLATES["hermes"]
    dialect = turns.dialect_of(turns.Model(template, tokens))
    turn = render(template, message(4)).replace("1", "2")
    assert turns.mistakes(dialect, 4, 1, "", turn)


@pytest.mark.skipif(not (PYTHON and FOLDER), reason="CALLS_PYTHON and CHAT_TEMPLATES name no peers")
def test_turns_of_models_are_read_as_they_were_written():
    counts, wrong = collections.defaultdict(collections.Counter), []
    for script in ("peer_rendering.py", "peer_libraries.py"):
        done = subprocess.run(
            [PYTHON, HERE / script, FOLDER], stdout=subprocess.PIPE, text=True, timeout=900, check=True
        )
        for line in done.stdout.splitlines():
            path, template, index, count, prompt, turn = json.loads(line)
            name = path.removeprefix(FOLDER).strip("/")
            if any(index in indices for part, indices in LOSSY.items() if part in path):
                counts[name]["lossy"] += 1
            elif isinstance(count, str):
                counts[name]["refused"] += 1
            else:
                check(name, template, index, count, prompt, turn, counts, wrong)
    for name, count in sorted(counts.items()):
        print(f"{name:75} {dict(count)}")
    print(
        f"{sum(count['read'] for count in counts.values())} turns of {sum(count['read'] > 4 for count in counts.values())} templates"
    )
    assert sum(count["read"] for count in counts.values()) > 500 and not wrong, "\n".join(wrong)


def check(name, template, index, count, prompt, turn, counts, wrong):
    tokens = turns.UNNAMED if any(part in name.lower() for part in ("llama-3", "llama3", "lfm")) else ()
    tokens = ("<|python_start|>",) if "llama4" in name else tokens
    dialect = turns.dialect_of(turns.Model(template, tokens))
    form = dialect.form
    if form is None or (count and not any(marker in turn for marker in (*form.begins, *form.bare))):
        counts[name]["without calls"] += 1
        return
    one = form.name in ("harmony", "gigachat") and name.endswith(".jinja")  # which write the first call
    mistakes = turns.mistakes(dialect, index, 1 if one else count, prompt, turn)
    counts[name]["wrong" if mistakes else "read"] += 1
    wrong += [f"{name} {index}: {mistake}" for mistake in mistakes]
