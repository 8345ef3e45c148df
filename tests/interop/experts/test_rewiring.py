"""capibara experts: from the command line and Python, on folders of several families; mistakes are one line."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import capibara as cb
from capibara import config
from capibara.cli import convert
from capibara.cli import experts as verb
from capibara.interop.experts import OPERATIONS, statistics
from capibara.models import api
from capibara.models.api import DecoderConfig, LatentAttention, Moe
from capibara.multihost import exits

TESTS = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(TESTS / "interop" / "merge"), str(TESTS / "models" / "golden")]
import llamas  # noqa: E402
import mixtures  # noqa: E402

SIZES = llamas.SIZES | {"head": "separate"}
LATENT = LatentAttention(query_rank=16, kv_rank=16, rotary_dim=4, value_dim=8)
FAMILIES = {
    "mixtral": DecoderConfig(**SIZES, moe=Moe(num_experts=4)),
    "qwen3_moe": DecoderConfig(**SIZES, qk_norm="head", moe=Moe(num_experts=4, top_k=3, expert_dim=16)),
    "gpt_oss": dataclasses.replace(mixtures.CONFIGS["gpt_oss"], vocab_size=258, mlp_dim=16),
    "deepseek_v3": DecoderConfig(
        **SIZES | {"num_kv_heads": None, "num_layers": 3},
        head_dim=12,
        latent=LATENT,
        rope=cb.Rope(pairs="adjacent"),
        moe=Moe(
            num_experts=8,
            expert_dim=16,
            first_dense=1,
            score="sigmoid",
            correction="expert",
            groups=2,
            shared_experts=1,
            scale=2.5,
        ),
    ),
}
COUNTS = {"qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}


def run(*argv):
    config.reset()
    return exits.run_verb(verb.main, [str(arg) for arg in argv])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of all families, of a Llama, and texts of two domains."""
    found = tmp_path_factory.mktemp("models")
    for name, of in FAMILIES.items():
        llamas.write(found / name, 1, of=of)
    llamas.write(found / "llama", 1)
    rng = np.random.default_rng(0)
    words = {"python": ["def", "return", "import os"], "sql": ["SELECT", "FROM", "WHERE x"]}
    lines = [
        {"text": " ".join(rng.choice(words[name], 12)), **({} if number % 5 == 4 else {"domain": name})}
        for number, name in enumerate(["python", "sql"] * 10)
    ]
    (found / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


@pytest.fixture(scope="module")
def use(folder):
    """The statistics of the Mixtral."""
    argv = [
        "stats",
        folder / "mixtral",
        f"--data={folder}/texts.jsonl",
        "--domains=python,sql",
        f"--out={folder}/use.json",
    ]
    assert run(*argv) == 0
    return folder / "use.json"


def logits(path):
    """Of 2 rows, in float32."""
    loaded = cb.load(str(path)).loaded
    config.reset()
    model = api.build(dataclasses.replace(loaded.model.config, dtype="float32"))
    tokens = np.random.default_rng(0).integers(1, 258, (2, 20)).astype(np.int32)
    positions = np.broadcast_to(np.arange(20, dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    params = jax.tree.map(lambda x: x.astype(np.float32), loaded.params)
    return np.asarray(jax.jit(model.logits)(params, batch))


def test_statistics_are_those_of_the_texts(use):
    found = statistics.read(str(use))
    assert [*found.domains] == ["all", "unknown", "python", "sql"] and found.layers == (0, 1)
    whole = found.domains["all"]
    lines = [json.loads(line) for line in (use.parent / "texts.jsonl").read_text().splitlines()]
    assert whole.tokens == sum(of.tokens for name, of in found.domains.items() if name != "all")
    assert found.domains["sql"].tokens > 0 and whole.tokens <= sum(len(line["text"]) + 1 for line in lines)
    for of in found.domains.values():
        np.testing.assert_allclose(of.share.sum(-1), 2)  # top_k
        assert (of.activation <= of.norm).all() and (of.norm[of.routed > 0] > 0).all()
    np.testing.assert_allclose(np.einsum("lee->le", found.pairs), whole.routed)
    assert json.loads(use.read_text())["domains"]["all"]["share"] == np.round(whole.share, 6).tolist()
    assert use.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_pruned_folder_has_the_tensors_of_the_experts_that_stay(folder, use, tmp_path, capsys):
    assert run("prune", folder / "mixtral", f"--statistics={use}", "--experts=3", f"--to={tmp_path}/out") == 0
    assert "mixtral" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "experts.json").read_text())
    assert report["settings"]["experts"] == report["experts"] == 3 and report["experts_per_token"] == 2
    whole, found = llamas.weights(folder / "mixtral"), llamas.weights(tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["num_local_experts"] == 3 and values["eos_token_id"] == 0
    activation = statistics.read(str(use)).domains["all"].activation
    for layer, made_of in report["made_of"].items():
        kept = [expert for (expert,) in made_of]
        assert kept == sorted(np.argsort(-activation[int(layer)])[:3])
        prefix = f"model.layers.{layer}.block_sparse_moe"
        np.testing.assert_array_equal(found[f"{prefix}.gate.weight"], whole[f"{prefix}.gate.weight"][kept])
        for new, old in enumerate(kept):
            for part in ("w1", "w2", "w3"):
                name = f"{prefix}.experts.{{}}.{part}.weight"
                np.testing.assert_array_equal(found[name.format(new)], whole[name.format(old)])
    assert len(found) == len(whole) - 2 * 3


def test_modules_that_predict_further_tokens_are_left_out_with_a_line(folder, tmp_path, caplog):
    """Their experts have no statistics of their own."""
    of = dataclasses.replace(FAMILIES["deepseek_v3"], mtp=cb.Mtp())
    llamas.write(tmp_path / "whole", 1, of=of)
    assert any("layers.3.eh_proj." in name for name in llamas.weights(tmp_path / "whole"))
    assert run("split", tmp_path / "whole", f"--to={tmp_path}/new") == 0
    assert "the modules for multi-token prediction are left out: their experts would be other ones" in caplog.text
    assert not any("layers.3." in name for name in llamas.weights(tmp_path / "new"))
    values = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (values["n_routed_experts"], values["num_nextn_predict_layers"]) == (16, 0)


def test_the_tokens_of_one_domain_can_count_alone(folder, use, tmp_path):
    found = statistics.read(str(use))
    changed = dataclasses.replace(found.domains["sql"], routed=np.array([[1.0, 2, 3, 4], [4, 3, 2, 1]]))
    dataclasses.replace(found, domains={**found.domains, "sql": changed}).write(str(tmp_path / "use.json"))
    argv = ["--experts=2", "--by=use", "--domain=sql", f"--statistics={tmp_path}/use.json", f"--to={tmp_path}/out"]
    assert run("prune", folder / "mixtral", *argv) == 0
    report = json.loads((tmp_path / "out" / "experts.json").read_text())
    assert report["made_of"] == {"0": [[2], [3]], "1": [[0], [1]]}


def test_python_and_the_command_write_the_same(folder, use, tmp_path):
    assert (
        run("merge", folder / "mixtral", f"--statistics={use}", "--experts=2", "--domain=sql", f"--to={tmp_path}/a")
        == 0
    )
    operation = cb.MergeExperts(experts=2, domain="sql")
    assert cb.rewire(str(folder / "mixtral"), str(tmp_path / "b"), operation, statistics=str(use)) == str(
        tmp_path / "b"
    )
    for name, value in llamas.weights(tmp_path / "a").items():
        np.testing.assert_array_equal(value, llamas.weights(tmp_path / "b")[name])


def test_python_measures_what_the_command_does(folder, use):
    found = cb.expert_statistics(str(folder / "mixtral"), [str(folder / "texts.jsonl")], domains=["python", "sql"])
    config.reset()
    np.testing.assert_allclose(found.domains["sql"].activation, statistics.read(str(use)).domains["sql"].activation)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_say_how_many_experts_there_are(folder, tmp_path, name):
    """Also where the first layers are dense; what is split computes what it did where it can."""
    moe = FAMILIES[name].moe
    assert (
        run("prune", folder / name, f"--experts={moe.num_experts - moe.groups}", "--by=random", f"--to={tmp_path}/a")
        == 0
    )
    assert run("split", folder / name, f"--to={tmp_path}/b") == 0
    key = COUNTS.get(name, "num_local_experts")
    found = [json.loads((tmp_path / part / "config.json").read_text()) for part in "ab"]
    assert [values[key] for values in found] == [moe.num_experts - moe.groups, 2 * moe.num_experts]
    assert {values["model_type"] for values in found} == {name}
    assert found[1]["num_experts_per_tok"] == 2 * moe.top_k
    if name != "deepseek_v3":  # its groups are chosen by their two best
        np.testing.assert_allclose(logits(tmp_path / "b"), logits(folder / name), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("granularity", [1, 2])
def test_an_upcycled_llama_is_a_mixtral_with_its_logits(folder, tmp_path, granularity):
    argv = ["--experts=4", "--top_k=2", f"--granularity={granularity}", f"--to={tmp_path}/out"]
    assert run("upcycle", folder / "llama", *argv) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mixtral"
    np.testing.assert_allclose(logits(tmp_path / "out"), logits(folder / "llama"), rtol=1e-4, atol=1e-4)


def test_adapters_are_merged_first(folder, tmp_path):
    draw, factors = np.random.default_rng(5), {}
    for layer in range(2):
        name = f"base_model.model.{llamas.QUERY.format(layer)}"
        factors |= {f"{name}.lora_A.weight": draw.standard_normal((2, 32), np.float32)}
        factors |= {f"{name}.lora_B.weight": draw.standard_normal((32, 2), np.float32)}
    (tmp_path / "lora").mkdir()
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    about["base_model_name_or_path"] = str(folder / "llama")
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(about))
    save_file(factors, tmp_path / "lora" / "adapter_model.safetensors")
    assert run("upcycle", tmp_path / "lora", "--experts=2", f"--to={tmp_path}/out") == 0
    want = llamas.weights(folder / "llama")[f"{llamas.QUERY.format(1)}.weight"]
    name = f"base_model.model.{llamas.QUERY.format(1)}"
    want = want + 2 * factors[f"{name}.lora_B.weight"] @ factors[f"{name}.lora_A.weight"]
    np.testing.assert_allclose(llamas.weights(tmp_path / "out")[f"{llamas.QUERY.format(1)}.weight"], want, atol=1e-5)


def test_a_run_is_measured_and_becomes_a_run(folder, tmp_path):
    """Statistics go to its folder, and the rewired run is loaded as any."""
    assert exits.run_verb(convert.main, [f"--from={folder}/mixtral", f"--to={tmp_path}/run", "--format=capibara"]) == 0
    assert run("stats", tmp_path / "run", "--limit=1", "--emulate=8", "--gin.Dataset.length=64") == 0
    assert {"expert_use.json", "expert_use.png"} <= {*os.listdir(tmp_path / "run")}
    argv = [f"--statistics={tmp_path}/run/expert_use.json", "--experts=6", "--noise=0.1", "--format=capibara"]
    assert run("duplicate", tmp_path / "run", *argv, f"--to={tmp_path}/out") == 0
    assert cb.load(str(tmp_path / "out")).loaded.model.config.moe.num_experts == 6


def test_every_operation_is_a_choice_of_the_verb(capsys):
    with pytest.raises(SystemExit):
        verb.main(["--help"])
    text = capsys.readouterr().out
    for name, cls in OPERATIONS.items():
        assert f"\n  {name} " in text
        for field in dataclasses.fields(cls):
            assert f"--{field.name} " in text, field.name


REFUSED = {
    "no action": ([], "experts needs one of stats, prune, merge, split, duplicate, upcycle, and a MODEL"),
    "no target": (["prune", "{}/mixtral", "--experts=3", "--by=random"], "prune needs --to=PATH"),
    "no statistics": (["prune", "{}/mixtral", "--experts=3", "--to={}/new"], "prune needs --statistics=FILE"),
    "no effect": (["split", "{}/mixtral", "--statistics={}/use.json", "--to={}/new"], "--statistics={}/use.json has no effect on split"),
    "missing": (["merge", "{}/mixtral", "--experts=3", "--statistics={}/no.json", "--to={}/new"], "{}/no.json does not exist"),
    "no json": (["merge", "{}/mixtral", "--experts=3", "--statistics={}/texts.jsonl", "--to={}/new"], "{}/texts.jsonl cannot be read"),
    "another json": (["merge", "{}/mixtral", "--experts=3", "--statistics={}/llama/config.json", "--to={}/new"], "has no statistics of experts"),
    "of another": (["prune", "{}/deepseek_v3", "--experts=6", "--statistics={}/use.json", "--to={}/new"], "has statistics of 4 experts in each of 2 layers"),
    "domain": (["prune", "{}/mixtral", "--experts=3", "--domain=sqll", "--statistics={}/use.json", "--to={}/new"], "domain is 'sqll', must be one of"),
    "no number": (["split", "{}/mixtral", "--parts=two", "--to={}/new"], "--parts=two must be a whole number: try 2"),
    "no member": (["prune", "{}/mixtral", "--experts=3", "--by=size", "--to={}/new"], "by"),
    "no setting": (["split", "{}/mixtral", "--experts=3", "--to={}/new"], "--experts=3 is not a setting of split, but of prune, merge"),
    "for stats": (["split", "{}/mixtral", "--limit=3", "--to={}/new"], "--limit=3 is not for split"),
    "not for stats": (["stats", "{}/mixtral", "--experts=3", "--out={}/x.json"], "--experts=3 is not for stats"),
    "no data": (["stats", "{}/mixtral", "--out={}/x.json"], "is no run, which would have data: name texts"),
    "no out": (["stats", "{}/mixtral"], "is no run folder, where statistics go by default"),
    "limit": (["stats", "{}/mixtral", "--limit=0", "--out={}/x.json"], "--limit=0 must be at least 1"),
    "dense": (["stats", "{}/llama", "--data={}/texts.jsonl", "--out={}/x.json"], "has no experts, its layers have MLPs"),
    "too few": (["prune", "{}/mixtral", "--experts=1", "--by=random", "--to={}/new"], "leave a token 1 to choose from"),
    "there": (["split", "{}/mixtral", "--to={}/llama"], "exists already"),
    "gemma": (["upcycle", "{}/gpt_oss", "--experts=3", "--to={}/new"], "has 8 experts already"),
    "family": (["upcycle", "{}/qwen2", "--experts=3", "--to={}/new"], "cannot be written after upcycle: transformers has no such"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_one_line(folder, use, capfd, case):
    argv, message = REFUSED[case]
    if case == "family" and not (folder / "qwen2").exists():
        llamas.write(folder / "qwen2", 1, bias="qkv", head="tied")
    capfd.readouterr()
    code = run(*(arg.replace("{}", str(folder)) for arg in argv))
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out, len(lines)) == (2, "", 1) and message.replace("{}", str(folder)) in lines[0], (code, out, err)
    assert not (folder / "new").exists() and not (folder / "x.json").exists()


def test_python_refuses_what_is_no_operation_and_no_list(folder, tmp_path):
    with pytest.raises(cb.UserError, match="operation is 'prune', must be one such as cb.PruneExperts"):
        cb.rewire(str(folder / "mixtral"), str(tmp_path / "new"), "prune")
    with pytest.raises(cb.UserError, match=r"domains is 'sql', must be a list of texts: try \['python'\]"):
        cb.expert_statistics(str(folder / "mixtral"), domains="sql")
