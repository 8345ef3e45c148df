"""`python -m capibara.infer` on a run of `capibara.train`."""

from __future__ import annotations

import io
import json
import os
import pathlib
import shutil

import pytest

RUN = "--model_dir=run"


@pytest.fixture(scope="module")
def trained(shell, made_here):
    made_here("train", "--gin_file=tiny.gin", "--emulate=8", "--gin.TRAIN_STEPS=60", "--gin.Trainer.ema_decay=0.5")
    return shell


@pytest.fixture
def infer(trained, here):
    def run(*args, prompt="river gr"):
        return here("infer", RUN, f"--prompt={prompt}", "--gin.Sampling.max_new_tokens=16", *args)

    return run


def test_it_continues_the_prompt_and_greedy_is_one_text(infer):
    greedy = infer("--gin.Sampling.temperature=0")
    assert (greedy.code, greedy.err) == (0, "")
    assert greedy.out.startswith("river gr") and len(greedy.out.strip()) > len("river gr")
    for limits in (["temperature=0", "seed=3"], ["top_k=1"], ["top_p=1e-9"]):
        assert infer(*(f"--gin.Sampling.{limit}" for limit in limits)).out == greedy.out
    assert len({infer(f"--gin.Sampling.seed={seed}", "--gin.Sampling.temperature=2.0").out for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("tokens", "note"),
    [
        pytest.param(8, "", marks=pytest.mark.heavy),
        (128, "those beyond Dataset.length (64) were chosen after the last 64 tokens alone\n"),
    ],
)
def test_a_process_of_its_own_says_what_it_has_written(trained, tokens, note):
    flags = ["--prompt=river gr", "--gin.Sampling.temperature=0", f"--gin.Sampling.max_new_tokens={tokens}"]
    process = trained.start("infer", RUN, *flags)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0 and out.startswith("river gr")
    assert err.endswith(note) and bool(err) == bool(note)


def test_standard_input_must_be_text(trained, here, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"river \xff"), encoding="utf-8"))
    assert "standard input is not text in UTF-8" in mistake(here("infer", RUN))


def test_a_document_is_read_with_a_memory(trained, here, shell):
    (shell.folder / "book.txt").write_text("grass grows by the river. " * 40)
    sizes = [
        "--gin.MemoryAgent.chunk_tokens=20",
        "--gin.MemoryAgent.memory_tokens=8",
        "--gin.Sampling.max_new_tokens=4",
    ]
    short = [
        "--gin.MemoryAgent.update='{question}|{memory}|{chunk}|'",
        "--gin.MemoryAgent.answer='{question}|{memory}|'",
    ]
    asked = ("infer", RUN, "--document=book.txt", *sizes, *short)
    done = here(*asked, "--prompt=where?", "--gin.Sampling.temperature=0")
    assert done.code == 0 and done.out.strip() and "MiB of keys and values, whatever the length" in done.err
    for flags, message in (
        ([], "--document excludes --prompts and --benchmark, and needs --prompt"),
        (["--prompt=x", "--benchmark"], "--document excludes --prompts"),
        (["--prompt=x", "--document=none.txt"], "--document=none.txt cannot be read"),
        (["--prompt=x", "--gin.MemoryAgent.chunk_tokens=999"], "lower MemoryAgent.chunk_tokens"),
        (["--prompt=x", "--gin.Sampling.num_decodes=2"], "Sampling.num_decodes is 2"),
    ):
        assert message in mistake(here(*asked, *flags))


def test_no_prompts_are_no_texts(trained, here, monkeypatch):
    (trained.folder / "none.txt").write_text("")
    monkeypatch.setattr("sys.stdin", None)
    assert here("infer", RUN, "--prompts=none.txt", "--out=none.jsonl").code == 0
    assert (trained.folder / "none.jsonl").read_text() == ""


def test_a_file_of_prompts_becomes_a_file_of_texts(here, infer, shell):
    (shell.folder / "in.txt").write_text("river gr\ngrass \nriver gr\n")
    asked = ("infer", RUN, "--prompts=in.txt", "--out=out.jsonl", "--gin.Sampling.temperature=0")
    assert here(*asked, "--gin.Sampling.max_new_tokens=16", "--gin.EngineConfig.slots=2").code == 0
    lines = [json.loads(line) for line in (shell.folder / "out.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["river gr", "grass ", "river gr"]
    assert lines[0] == lines[2] and len({line["text"] for line in lines}) == 2
    assert infer("--gin.Sampling.temperature=0").out == "river gr" + lines[0]["text"] + "\n"
    done = here(*asked, "--gin.Sampling.max_new_tokens=16")
    assert done.code == 0 and done.err.endswith("3 texts in out.jsonl\n")
    said = mistake(here(*asked, "--gin.Sampling.max_new_tokens=16", "--gin.Sampling.seed=1"))
    assert "line 1 has another sampling" in said
    for name, why in (("in.txt", "in.txt is an input"), (".", "cannot be written")):
        assert why in mistake(here(*asked[:3], f"--out={name}"))
    assert (shell.folder / "in.txt").read_text() == "river gr\ngrass \nriver gr\n"
    assert "go together" in mistake(here("infer", RUN, "--prompts=in.txt"))
    (shell.folder / "in.txt").write_text("river gr\n" + "grass " * 100 + "\n")
    assert "in.txt:2: " in mistake(here("infer", RUN, "--prompts=in.txt", "--out=long.jsonl"))


def test_the_benchmark_prints_speeds(here):
    done = here("infer", RUN, "--benchmark", "--gin.EngineConfig.slots=2", "--gin.Sampling.max_new_tokens=4")
    assert done.code == 0, done.err
    speeds = {name: float(value) for name, value in (line.split() for line in done.out.splitlines())}
    assert {"prefill_tokens_per_s", "decode_tokens_per_s", "between_tokens_ms_p99"} < speeds.keys()
    assert all(value > 0 for value in speeds.values())


def test_the_averaged_parameters_are_used(infer, trained, monkeypatch):
    from capibara.inference.sample import Generator

    seen = []
    monkeypatch.setattr(Generator, "__call__", lambda self, params, prompt: seen.append(params) or "")
    assert infer().code == 0
    assert infer("--gin.Trainer.ema_decay=None").code == 0  # what was kept decides

    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        saved = reader.restore(trained.folder / "run" / "checkpoints" / "60" / "state")
    for params in seen:
        jax.tree.map(np.testing.assert_array_equal, params, saved["ema"])
    assert not np.array_equal(saved["ema"]["embedding"], saved["params"]["embedding"])


@pytest.mark.heavy
def test_a_shrunk_run_is_recorded_as_it_ran(shell, here):
    """--emulate shrinks the base model: config.gin holds the sizes that ran, so that infer finds them."""
    done = shell.run(
        "train",
        "--gin_file=base_v5e64.gin",
        "--emulate=2",
        "--gin.TRAIN_STEPS=1",
        "--gin.MODEL_DIR=base",
        "--gin.Dataset.mixture_or_task_name=None",
        "--gin.Dataset.source=@StdlibSource()",
        "--gin.Evaluation.every=0",
    )
    assert done.code == 0, done.err
    assert "DecoderConfig.embed_dim = 128" in done.out
    text = (shell.folder / "base" / "config.gin").read_text()
    assert "DecoderConfig.embed_dim = 128" in text and "DecoderConfig.mlp_dim = 320" in text
    out = here("infer", "--model_dir=base", "--prompt=def ", "--gin.Sampling.max_new_tokens=4")
    assert (out.code, out.err) == (0, "") and out.out.startswith("def ")


def mistake(done):
    lines = [line for line in done.err.splitlines() if line]
    assert done.code == 2 and len(lines) == 1 and lines[0].startswith("error: "), (done.out, done.err)
    return lines[0]


def test_mistakes_are_one_line(infer, here, shell):
    assert "none is not a run folder" in mistake(here("infer", "--model_dir=none", "--prompt=a"))
    assert "--model_dir has no value" in mistake(here("infer", "--prompt=a"))
    empty = shell.folder / "empty"
    empty.mkdir()
    (empty / "config.gin").write_text((shell.folder / "run" / "config.gin").read_text())
    assert "holds no checkpoint yet" in mistake(here("infer", "--model_dir=empty", "--prompt=a"))
    assert "holds another model" in mistake(infer("--gin.DecoderConfig.mlp_dim=96"))
    assert "Sampling.temperature is -1" in mistake(infer("--gin.Sampling.temperature=-1"))
    assert "did you mean temperature?" in mistake(infer("--gin.Sampling.temprature=1"))
    assert "Sampling.seed is 1180591620717411303424" in mistake(infer("--gin.Sampling.seed=1180591620717411303424"))


@pytest.mark.heavy
def test_a_run_folder_that_was_moved_has_its_tokenizer(here, shell, toy_tokenizer):
    """infer, evaluate, convert and a resume need nothing of where it was trained, and it is a path to its tokenizer."""
    shutil.copytree(toy_tokenizer, shell.folder / "tok")
    given = ("--gin.Dataset.vocabulary=@TokenizerJsonVocabulary()", "--gin.TokenizerJsonVocabulary.path=tok")
    short = ("--emulate=8", "--gin.TRAIN_STEPS=2")
    done = here("train", "--gin_file=tiny.gin", *short, *given, "--gin.MODEL_DIR=first")
    assert done.code == 0, done.err
    asked = ("--chat", "--prompt=river", "--gin.Sampling.temperature=0", "--gin.Sampling.max_new_tokens=6")
    text = here("infer", "--model_dir=first", *asked)
    assert text.code == 0, text.err
    os.rename(shell.folder / "first", shell.folder / "moved")
    shutil.rmtree(shell.folder / "tok")
    again = here("infer", "--model_dir=moved", *asked)
    assert (again.code, again.out, again.err) == (0, text.out, "")
    assert here("evaluate", "--model_dir=moved", "--limit=1").code == 0
    assert here("convert", "--from=moved", "--to=hf").code == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        own = (shell.folder / "moved" / "tokenizer" / name).read_bytes()
        assert own == (shell.folder / "hf" / name).read_bytes() == pathlib.Path(toy_tokenizer, name).read_bytes()
    mistake(here("infer", "--model_dir=moved", *asked, "--gin.TokenizerJsonVocabulary.path=tik"))
    named = here("infer", "--model_dir=moved", *asked, "--gin.TokenizerJsonVocabulary.path=moved")
    assert (named.code, named.out) == (0, text.out)
    more = here("train", "--gin_file=tiny.gin", *short, *given, "--gin.MODEL_DIR=moved", "--gin.TRAIN_STEPS=3")
    assert more.code == 0, more.err
    assert json.loads((shell.folder / "moved" / "paths.json").read_text())["tok"] == "tokenizer"


def test_a_model_that_convert_took_in_may_be_moved(here, trained, toy_tokenizer, tmp_path):
    hf = tmp_path / "hf"
    assert here("convert", RUN.replace("--model_dir", "--from"), f"--to={hf}").code == 0
    for name in os.listdir(toy_tokenizer):
        shutil.copy(pathlib.Path(toy_tokenizer, name), hf)
    assert here("convert", f"--from={hf}", f"--to={tmp_path}/base", "--format=capibara").code == 0
    os.rename(tmp_path / "base", tmp_path / "elsewhere")
    done = here("infer", f"--model_dir={tmp_path}/elsewhere", "--prompt=river", "--gin.Sampling.max_new_tokens=2")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("mesh", [("tensor=2",), ("data=2", "tensor=2")], ids=str)
def test_texts_of_a_mesh_are_those_of_one_device(infer, mesh):
    asked = ("--prompt=river", "--gin.Sampling.temperature=0")
    one = infer(*asked)
    assert one.code == 0, one.err
    several = infer(*asked, "--emulate=8", *(f"--gin.ServingMesh.{axis}" for axis in mesh))
    assert (several.code, several.out, several.err) == (0, one.out, "")
