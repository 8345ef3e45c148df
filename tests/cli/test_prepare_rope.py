"""`capibara prepare rope` and `cb.prepare_rope`: a longer context of a small model, in Gin and config.json, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

import jax
import numpy as np
import pytest

import capibara as cb
from capibara import config
from capibara.cli import prepare
from capibara.cli.composition import models
from capibara.core.types import UserError
from capibara.evaluation.context.extension import Extension
from capibara.evaluation.context.search import Individual
from capibara.interop import conversion, gin_of
from capibara.interop.hf import config as hf_config
from capibara.models import api
from capibara.models.api import DecoderConfig, Rope
from capibara.multihost import exits
from capibara.training import run_folder

RECORDED = pathlib.Path(__file__).parents[1] / "interop" / "families" / "recorded"
SMALL = cb.RopeSearch(documents=2, population=4, parents=2, mutations=2, crossovers=2, iterations=2, reach=1.5)
MODEL = DecoderConfig(
    vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32", max_length=32,
    rope=Rope(theta=500.0),
)  # fmt: skip


def save(folder, model: DecoderConfig) -> str:
    os.makedirs(folder)
    params = jax.tree.map(lambda x: x * 2, jax.jit(api.build(model).init)(jax.random.key(1)))
    run_folder.save(str(folder), params, gin_of.run(model, str(folder), {}, length=32))
    config.reset()
    return str(folder)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("rope") / "run", MODEL)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("documents") / "long.jsonl"
    texts = ["".join(rng.choice([*"abcd "], 150)) for _ in range(4)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["short", *texts]))
    return str(path)


def verb(main, *argv) -> int:
    config.reset()
    return exits.run_verb(main, [*argv])


@pytest.fixture(scope="module")
def report(run_dir, data, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("out") / "longer")
    flags = [f"--gin.RopeSearch.{name}={getattr(SMALL, name)}" for name in dataclasses.asdict(SMALL)]
    assert (
        verb(prepare.main, "rope", f"--model_dir={run_dir}", f"--data={data}", "--length=128", f"--out={out}", *flags)
        == 0
    )
    with open(f"{out}/rope.json") as file:
        return out, json.load(file)


def mean_loss(loaded, ids) -> float:
    batch = {"tokens": ids[:, :-1], "segment_ids": np.ones_like(ids[:, 1:])}
    batch["positions"] = np.broadcast_to(np.arange(ids.shape[1] - 1, dtype=np.int32), ids[:, 1:].shape)
    logits = loaded.model.logits(loaded.params, batch)
    return -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), ids[:, 1:, None], axis=-1).mean()


def test_the_report_has_what_the_written_bindings_compute(run_dir, data, report):
    out, told = report
    assert told["original_length"] == 32 and told["documents"] == told["test_documents"] == 2
    assert told["loss"].keys() == {"unchanged", "linear", "ntk", "yarn", "longrope"}
    first = [json.loads(line) for line in open(f"{out}/evaluations.jsonl")][1:]
    assert told["loss"]["longrope"] == pytest.approx(min(line["loss"] for line in first), rel=1e-6)
    assert told["scalings"] == len(first) and told["factors"] == sorted(told["factors"])
    extended = models.load(run_dir, [f"{out}/rope.gin"])
    config.reset()
    rope = extended.model.config.rope
    assert rope.scaling == "longrope" and list(rope.long_factors) == told["factors"] and rope.theta == 500.0
    assert extended.dataset.length == extended.model.config.max_length == 128
    texts = [json.loads(line)["text"] for line in open(data)][1:]
    ids = np.array([extended.tokenizer.prompt_ids(text)[:129] for text in texts], np.int32)
    assert told["loss"]["longrope"] == pytest.approx(mean_loss(extended, ids[:2]), rel=1e-4)
    assert told["test"]["longrope"] == pytest.approx(mean_loss(extended, ids[2:]), rel=1e-4)
    assert told["short"]["unchanged"] == pytest.approx(mean_loss(models.load(run_dir), ids[2:, :33]), rel=1e-4)
    config.reset()


def test_config_json_says_what_transformers_reads(run_dir, report, tmp_path):
    out, told = report
    target = str(tmp_path / "hf")
    conversion.convert(run_dir, target, "hf", None, None, models.ModelReader(gin=([f"{out}/rope.gin"], [], [])))
    config.reset()
    values = json.load(open(f"{target}/config.json"))
    assert told["config"].items() <= values.items()
    rope = values["rope_parameters"]
    assert rope["rope_type"] == "longrope" and rope["long_factor"] == told["factors"]
    assert rope["short_factor"] == [1.0] * 8 and rope["original_max_position_embeddings"] == 32
    assert values["max_position_embeddings"] == 128 and rope["factor"] == 4.0
    magnitude = rope.get("attention_factor") or (1 + np.log(4) / np.log(32)) ** 0.5
    assert magnitude == pytest.approx(told["attention_factor"])


def test_an_interrupted_search_resumes(run_dir, data, report, tmp_path):
    out, told = report
    lines = open(f"{out}/evaluations.jsonl").read().splitlines()
    other = tmp_path / "other"
    other.mkdir()
    changed = [*lines[:3], json.dumps(json.loads(lines[3]) | {"loss": 0.5})]  # is not computed again
    (other / "evaluations.jsonl").write_text("\n".join(changed) + "\n" + lines[4][:20])
    result = cb.prepare_rope(run_dir, data, str(other), 128, settings=SMALL)
    assert result["factors"] == json.loads(lines[3])["factors"]
    with pytest.raises(
        UserError, match=r"--out=.*other exists and is of another model, data or settings: name another"
    ):
        cb.prepare_rope(run_dir, data, str(other), 96, settings=SMALL)
    for loss in (None, "1", float("nan")):
        edited = json.dumps(json.loads(lines[1]) | {"loss": loss})
        (other / "evaluations.jsonl").write_text(f"{lines[0]}\n{edited}\n")
        with pytest.raises(UserError, match="--out=.*other: loss of a line is .*, must be a number: remove the line"):
            cb.prepare_rope(run_dir, data, str(other), 128, settings=SMALL)
    again = cb.prepare_rope(run_dir, [data], out, 128, settings=SMALL)
    assert again["factors"] == told["factors"] and open(f"{out}/evaluations.jsonl").read().splitlines() == lines


def test_first_tokens_are_for_gin_alone(run_dir, data, tmp_path):
    settings = dataclasses.replace(SMALL, unscaled_tokens=(16,), mutation_probability=1.0, attention_factor=1.0)
    starts_lose = dataclasses.replace(settings, parents=8)
    result = cb.prepare_rope(run_dir, data, str(tmp_path / "out"), 128, settings=starts_lose)
    lines = [json.loads(line) for line in open(tmp_path / "out" / "evaluations.jsonl")][1:]
    assert {line["unscaled_tokens"] for line in lines} == {0, 16}
    assert result["attention_factor"] == 1.0 and result["short"]["longrope"] == result["short"]["unchanged"]
    assert (result["config"] is None) == (result["unscaled_tokens"] > 0)
    with pytest.raises(UserError, match="no Hugging Face architecture has this model: .* without rope"):
        gin = ([f"{tmp_path}/out/rope.gin"], ["extended/Rope.unscaled_tokens = 16"], [])
        conversion.convert(run_dir, str(tmp_path / "hf"), "hf", None, None, models.ModelReader(gin=gin))
    config.reset()


def test_what_cannot_be_extended_is_refused_by_name(run_dir, data, tmp_path, capsys):
    out = str(tmp_path / "out")
    learned = save(tmp_path / "learned", dataclasses.replace(MODEL, positions="learned", rope=Rope()))
    scaled = save(
        tmp_path / "scaled", dataclasses.replace(MODEL, rope=Rope(scaling="linear", factor=2.0), max_length=None)
    )
    for model, length, message in (
        (learned, 128, "is a DecoderConfig with positions 'learned', and rotary positions of a decoder are extended"),
        (scaled, 128, "has Rope.scaling = 'linear', and a search begins from positions that are not scaled"),
        (run_dir, 32, "--length=32 must be above the 32 tokens of .*run, and below 2..31: try 128"),
        (run_dir, 2**31, "--length=2147483648 must be above the 32 tokens of .*run, and below 2..31: try 128"),
        (run_dir, 1024, "has no document of 1025 tokens, its longest has 15[0-9]: name longer ones"),
    ):
        with pytest.raises(UserError, match=message):
            cb.prepare_rope(model, data, out, length, settings=SMALL)
    with open(RECORDED / "gptj.json") as file:
        gptj = Extension("gptj", hf_config.from_hf(json.load(file)["config"]), 32, 128)
    with pytest.raises(UserError, match="gptj cannot be written with longrope scaling .*without rope"):
        gptj.entries(gptj.rope(Individual((1.0,) * gptj.frequencies), None))
    for call, message in (
        (lambda: cb.prepare_rope(run_dir, data, out, 1.5), "length is 1.5, must be a number of at least 2"),
        (lambda: cb.prepare_rope(run_dir, 5, out, 128), "data is 5, must be a path, or a list of paths"),
        (lambda: cb.prepare_rope(run_dir, f"{data}x", out, 128), "--data .*long.jsonlx.* matches no file"),
        (lambda: cb.prepare_rope(run_dir, data, out, 128, settings=3), r"settings is 3, must be cb.RopeSearch\(...\)"),
    ):
        with pytest.raises(UserError, match=message):
            call()
    assert verb(prepare.main, "rope", f"--model_dir={run_dir}", f"--data={data}", f"--out={out}") == 2
    assert "--length is missing: try --length=32768" in capsys.readouterr().err
    assert verb(prepare.main, "rope", f"--data={data}", f"--out={out}", "--length=64") == 2
    assert "pass one of --model_dir" in capsys.readouterr().err
    assert not os.path.exists(out)


def test_files_of_no_search_stay_and_a_search_needs_a_finite_loss(run_dir, data, tmp_path):
    (tmp_path / "rope.gin").write_text("# mine\n")
    with pytest.raises(UserError, match=r"rope.gin exists, and is of no search .*: name another --out"):
        cb.prepare_rope(run_dir, data, str(tmp_path), 128, settings=SMALL)
    assert (tmp_path / "rope.gin").read_text() == "# mine\n"
    infinite = dataclasses.replace(SMALL, attention_factor=1e38)
    with pytest.raises(
        UserError, match="run has no finite loss with any of [0-9]+ scalings: name a model that has not"
    ):
        cb.prepare_rope(run_dir, data, str(tmp_path / "out"), 128, settings=infinite)
    assert not os.path.exists(tmp_path / "out" / "rope.gin")
