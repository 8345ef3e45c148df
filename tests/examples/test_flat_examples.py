"""The scripts of examples/ run, as scripts and as notebooks; what they print is what their text says."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import subprocess
import sys

import jupytext
import nbclient
import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples"
NEEDS = {"finetune": "pretrain", "preference": "finetune"}  # the example whose run folder it begins from
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # as in a shell of a user


def source(name: str, **constants: object) -> str:
    """The text of an example with other constants."""
    text = (FOLDER / f"{name}.py").read_text()
    for constant, value in constants.items():
        text, count = re.subn(rf"\b{constant}( ?)=\1[^,\n)]+", rf"{constant}\1=\g<1>{value!r}", text, count=1)
        assert count == 1, constant
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def printed(folder):
    """Name -> what the script prints at its own size, after those that it needs; each runs once."""
    outputs: dict[str, str] = {}

    def run(name: str) -> str:
        if name not in outputs:
            if name in NEEDS:
                run(NEEDS[name])
            argv = [sys.executable, str(FOLDER / f"{name}.py")]
            done = subprocess.run(argv, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            outputs[name] = done.stdout
        return outputs[name]

    return run


def test_there_are_five_flat_scripts_of_a_page():
    assert NAMES == ["consensus", "finetune", "plan_and_launch", "preference", "pretrain"]
    for name in NAMES:
        text = source(name)
        assert len(text.splitlines()) <= 80 and text.startswith("# %% [markdown]\n# # "), name
        assert not [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)], name


def test_a_model_is_pretrained_and_fine_tuned_in_two_steps_each(folder, monkeypatch, capsys):
    small = folder / "small"
    small.mkdir()
    monkeypatch.chdir(small)
    exec(compile(source("pretrain", STEPS=2, num_layers=1), "pretrain.py", "exec"), {"__name__": "pretrain"})
    exec(compile(source("finetune", STEPS=2, max_tokens=2), "finetune.py", "exec"), {"__name__": "finetune"})
    assert {"finetune.gguf", "finetune_hf", "pretrain", "finetune"} <= {
        path.name for path in (small / "runs").iterdir()
    }
    assert "loss on held-out text by step: {" in capsys.readouterr().out


def test_four_nodes_agree_in_small(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = source("consensus", STEPS=2, every=2, num_layers=1).replace("emulate=4", "emulate=8")
    text = text.replace("every=10", "every=2")
    exec(compile(text, "consensus.py", "exec"), {"__name__": "consensus"})
    assert "four nodes: loss on held-out text" in capsys.readouterr().out


def test_a_slice_is_planned_in_small(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = source("plan_and_launch", SLICE="v5e-1", vocab_size=512, num_layers=1, embed_dim=128, num_heads=1)
    text = text.replace("length=2048)", "length=2048, batch_size=4)", 1)  # larger ones are compiled in vain first
    exec(compile(text, "plan_and_launch.py", "exec"), {"__name__": "plan_and_launch"})
    out = capsys.readouterr().out
    assert "fits: True" in out and "kind: JobSet" in out


@pytest.mark.parametrize("name", NAMES)
def test_a_script_shows_what_it_says(name, printed):
    out = printed(name)
    if name == "pretrain":
        losses = ast.literal_eval(re.search(r"by step: (\{.*\})", out)[1])
        assert losses[60] < losses[30] < 4
    elif name == "finetune":
        assert "A lime is green." in out and re.search(r"runs/pretrain 0, runs/finetune 1", out)
    elif name == "preference":
        margins, rewards = (ast.literal_eval(line) for line in re.findall(r"by step: (\[.*\])", out))
        assert margins[-1] > margins[0] + 1 and rewards[-1] > rewards[0] + 0.4
    elif name == "consensus":
        assert re.search(r"four nodes: loss on held-out text 3\.", out)
    else:
        assert "fits: True" in out and "kind: JobSet" in out


def notebook(name: str, **constants: object) -> str:
    """What a notebook prints."""
    made = jupytext.reads(source(name, **constants), fmt="py:percent")
    assert [cell.cell_type for cell in made.cells][:2] == ["markdown", "code"]
    nbclient.NotebookClient(made, timeout=600, kernel_name="python3").execute()
    outputs = [output for cell in made.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs)


def test_the_first_example_is_a_notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "loss on held-out text by step: {" in notebook("pretrain", STEPS=2, num_layers=1)


@pytest.mark.heavy
def test_every_example_is_a_notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS")
    for name in ("pretrain", "finetune", "preference", "consensus", "plan_and_launch"):
        assert notebook(name), name
