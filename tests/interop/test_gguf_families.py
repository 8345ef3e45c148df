"""Declared families of GGUF files: they come back as they were, and llama.cpp computes the same from them.

`make test` compares with recorded tokens of llama.cpp, gguf_families.json; with xllamacpp installed
    .venv/bin/python tests/interop/test_gguf_families.py [NAME ...]    records them.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import tempfile
from typing import Any

import jax
import numpy as np
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1] / "benchmarks")]
import gguf  # noqa: E402
import gguf_cases  # noqa: E402
import test_gguf  # noqa: E402
from gguf_families import CASES, WHOLE, YARN, rope, tensors  # noqa: E402

from capibara.core.types import UserError  # noqa: E402
from capibara.interop import open_model  # noqa: E402
from capibara.interop.gguf import names as gguf_names  # noqa: E402
from capibara.interop.gguf import types as gguf_types  # noqa: E402
from capibara.interop.gguf.read import open_gguf  # noqa: E402
from capibara.interop.gguf.write import write_gguf  # noqa: E402
from capibara.interop.hf import config as hf_config  # noqa: E402
from capibara.interop.hf import folder as hf_folder  # noqa: E402
from capibara.models import api  # noqa: E402

RECORDED = HERE / "gguf_families.json"
COUNT = 48
# Seeds of prompts after which llama.cpp does not generate its end token.
SEEDS = {"jamba": 1, "glm4_moe": 2, "qwen3_next": 1, "granitemoehybrid_dense": 1, "hunyuan_v1_moe": 1, "minimax_m2": 1}
SEEDS |= {"deepseek_v3": 1, "qwen3_5_two_pairs": 3}


def prompt(name: str) -> list[int]:
    return [int(i) for i in np.random.default_rng(SEEDS.get(name, 0)).integers(2, 300, 12)]


def write(path: pathlib.Path, name: str, dtype: str = "f32", **changes: Any) -> pathlib.Path:
    """The tiny model of a case, as a GGUF file."""
    config = CASES[name] | changes
    write_gguf(path, config, tensors(config), gguf_cases.byte_level(), dtype=dtype)
    return path


def logits(path: pathlib.Path, ids: list[int]) -> np.ndarray:
    """Our model's logits [T, V] in float32, with the weights of a file."""
    return logits_of(open_gguf(path), ids)


def logits_of(foreign: open_model.ForeignModel, ids: list[int]) -> np.ndarray:
    model = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = open_model.load_params(foreign, model, jax.tree.map(lambda _: here, model.abstract_params))
    tokens = np.array([ids], np.int32)
    positions = np.arange(len(ids), dtype=np.int32)[None]
    batch = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    return np.asarray(jax.jit(model.logits)(params, batch))[0]


def continued(path: pathlib.Path, name: str) -> dict[str, Any]:
    """What llama.cpp generates from the prompt, and the log probabilities after it."""
    from gguf_files import LlamaCpp

    with LlamaCpp(sys.executable, path) as peer:
        ids = peer.ask("continue", ids=prompt(name), count=COUNT)["ids"]
        best = peer.ask("continue", ids=prompt(name), count=1, best=gguf_cases.VOCAB)["best"]
    return {"ids": ids, "best": best[0] if best else []}


FOLDED = ("falcon_h1_factors",)  # whose factors are in the weights of a file


@pytest.mark.parametrize("name", [name for name in CASES if name not in FOLDED])
def test_a_declared_family_comes_back_as_it_was(name, tmp_path):
    config, read = CASES[name], open_gguf(write(tmp_path / "model.gguf", name))
    assert hf_config.differences(read.config, hf_config.from_hf(config)) == {}
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        assert read.config.get(key) == config.get(key)
    values = dict(tensors(config))
    assert read.shapes() == {key: value.shape for key, value in values.items()}
    for key, value in values.items():
        # A file holds the exponentials of these, and several logarithms have the same one.
        rounding = np.spacing(np.float32(1)) if key.endswith("A_log") else 0
        np.testing.assert_allclose(read.read(key), value, rtol=0, atol=rounding, err_msg=key)


def test_layers_that_predict_several_tokens_are_left_out(tmp_path):
    """As llama.cpp's converter writes GLM 4.5: one layer more, and its number."""
    path = write(tmp_path / "model.gguf", "glm4_moe")
    more = {f"blk.3.{name}.weight": np.ones((4, 32), np.float32) for name in ("nextn.eh_proj", "attn_q")}
    values = {"general.architecture": "glm4moe", "glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    changed = test_gguf.copy(path, tmp_path / "more.gguf", values=values, more=more)
    with pytest.warns(UserWarning, match="2 tensors of layers that predict several tokens are left out"):
        read = open_gguf(changed)
    assert read.config == open_gguf(path).config and read.shapes() == open_gguf(path).shapes()
    with pytest.raises(UserError, match=r"glm4moe.nextn_predict_layers is 4, must be 0 to 3"):
        open_gguf(test_gguf.copy(changed, path, values=values | {"glm4moe.nextn_predict_layers": 4}))


def test_factors_in_the_weights_are_those_of_the_model(tmp_path):
    """Falcon-H1's: a file's model has none, and computes the same."""
    config = CASES["falcon_h1_factors"]
    values = dict(tensors(config))
    shapes = {name: value.shape for name, value in values.items()}
    hf_folder.save_hf(str(tmp_path / "hf"), config, shapes, values.items(), {}, dtype="float32")
    want = logits_of(open_model.open_model(str(tmp_path / "hf")), prompt(""))
    got = logits_of(open_gguf(write(tmp_path / "model.gguf", "falcon_h1_factors")), prompt(""))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


# Case, changes of its config.json, and what is said of them.
REFUSED = [
    ("olmo2", {"tie_word_embeddings": True}, "tie_word_embeddings of the olmo2 model is True"),
    ("olmo2", {"head_dim": 16}, "head_dim of the olmo2 model is 16, llama.cpp computes it with 8"),
    ("granite", {"hidden_act": "gelu"}, "hidden_act of the granite model is 'gelu'"),
    ("cohere", {"use_qk_norm": True}, "qk_norm of the cohere model is 'heads'"),
    # Sizes of which llama.cpp knows one model.
    ("cohere", {"num_hidden_layers": 64}, "qk_norm of the cohere model is 'none', llama.cpp computes it with heads"),
    ("cohere", {"num_hidden_layers": 63, "use_qk_norm": True}, "qk_norm of the cohere model is 'heads'"),
    ("exaone4", {"num_hidden_layers": 64}, "of the exaone4 model"),
    ("gemma2_listed", {"num_hidden_layers": 46, "layer_types": [WHOLE] * 46}, "query_pre_attn_scalar of the gemma2"),
    ("gemma3_whole", {"num_hidden_layers": 62, "layer_types": [WHOLE] * 62}, "query_pre_attn_scalar of the gemma3_text"),
    ("gemma2_listed", {"query_pre_attn_scalar": 17}, "query_pre_attn_scalar of the gemma2 model is 17"),
    ("cohere2", {"sliding_window": None}, "sliding_window is missing"),
    ("exaone4", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, "of the exaone4 model"),
    ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1]}, "layer_types of the smollm3 model is"),
    ("smollm3", {"mlp_bias": True}, "attention_bias or mlp_bias of the smollm3 model is 'mlp'"),
    ("glm4", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic' of a glm4"),
    ("seed_oss", {"attention_out_bias": True}, "of the seed_oss model is 'attention'"),
    ("phi", {"qk_layernorm": True}, "q_layernorm.weight of the phi model has no place in phi2 files"),
    ("falcon", {"alibi": True, "rope_parameters": None}, "positions of the falcon model is 'alibi_rounded'"),
    ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob of the olmoe model is True"),
    ("olmoe", {"clip_qkv": 0.5}, "clip_qkv of the olmoe model is 0.5, llama.cpp computes it with None"),
    ("dots1", {"num_key_value_heads": 2}, "num_key_value_heads of the dots1 model is 2, llama.cpp computes it with 4"),
    ("glm4_moe", {"topk_group": 4}, "topk_group of the glm4_moe model is 4, llama.cpp computes it with less than 4"),
    ("dots1", {"n_shared_experts": 0}, "n_shared_experts is 0, llama.cpp computes no model of the family without"),
    ("deepseek_v2", {"rms_norm_eps": 1e-5}, "rms_norm_eps of the deepseek_v2 model is 1e-05"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, "n_group of the deepseek_v2"),
    ("deepseek_v3", {"num_hidden_layers": 27}, "q_lora_rank of a model of 27 layers is 20"),
    ("deepseek_v3", {"rope_parameters": YARN}, "mscale and mscale_all_dim of the deepseek_v3 model's yarn scaling"),
    ("deepseek_v3", {"rope_parameters": rope("linear", factor=2.0)}, "'linear' of a deepseek_v3 model"),
    ("mamba", {"expand": 4}, "inner_dim of the mamba model is 128, llama.cpp computes it with 64"),
    ("mamba2", {"time_step_limit": [0.1, 2.0]}, "least_step of the mamba2 model is 0.1"),
    ("falcon_mamba", {"mixer_rms_eps": 1e-3}, "mixer_rms_eps of the falcon_mamba model is 0.001"),
    ("qwen3_next", {"linear_value_head_dim": 8}, "linear_value_head_dim of the qwen3_next model is 8"),
    ("granitemoehybrid", {"layer_types": ["full_attention"] * 3}, "has no recurrent layers"),
]  # fmt: skip


@pytest.mark.parametrize("name, changes, match", REFUSED)
def test_what_llama_cpp_computes_otherwise_is_refused(name, changes, match, tmp_path):
    with test_gguf.one_line(match):
        write(tmp_path / "model.gguf", name, **changes)
    assert not [*tmp_path.iterdir()]


def test_older_files_list_no_windows(tmp_path):
    path = write(tmp_path / "model.gguf", "cohere2")
    values = {"general.architecture": "cohere2", "cohere2.attention.sliding_window_pattern": None}
    assert open_gguf(test_gguf.copy(path, tmp_path / "old.gguf", values=values)).config == open_gguf(path).config


def test_vectors_with_a_dimension_of_one_are_vectors(tmp_path):
    """As llama.cpp's converter stores the gate of a shared expert: a matrix of one row."""
    path, gate = write(tmp_path / "model.gguf", "qwen2_moe"), "blk.0.ffn_gate_inp_shexp.weight"
    (value,) = (part.data for part in gguf.GGUFReader(path).tensors if part.name == gate)
    stored = {gate: (value[None], gguf.GGMLQuantizationType.F32)}
    values = {"general.architecture": "qwen2moe"}
    read = open_gguf(test_gguf.copy(path, tmp_path / "theirs.gguf", values=values, stored=stored))
    np.testing.assert_array_equal(read.read("model.layers.0.mlp.shared_expert_gate.weight"), value[None])


def test_keys_of_latent_attention_are_stored_transposed_by_head(tmp_path):
    """As llama.cpp absorbs them into the queries: of each head [rank, keys]; its values stay [values, rank]."""
    config = CASES["deepseek_v3"]
    stored = {part.name: part.data for part in gguf.GGUFReader(write(tmp_path / "model.gguf", "deepseek_v3")).tensors}
    rows = dict(tensors(config))["model.layers.0.self_attn.kv_b_proj.weight"].reshape(4, 16 + 12, 24)
    np.testing.assert_array_equal(stored["blk.0.attn_k_b.weight"], rows[:, :16].swapaxes(1, 2))
    np.testing.assert_array_equal(stored["blk.0.attn_v_b.weight"], rows[:, 16:])


def test_metadata_that_only_llama_cpp_needs_are_written(tmp_path):
    fields = gguf.GGUFReader(write(tmp_path / "model.gguf", "ernie4_5_moe")).fields
    assert fields["ernie4_5-moe.interleave_moe_layer_step"].contents() == 1  # it divides by it
    assert fields["ernie4_5-moe.expert_shared_feed_forward_length"].contents() == 64


# Case, changed metadata, and what is said of them.
FOREIGN = [
    ("granite", {"residual_scale": "x"}, "granite.residual_scale is 'x', must be a finite number"),
    ("olmo", {"attention.layer_norm_epsilon": 1e-6}, "olmo.attention.layer_norm_epsilon is 1e-06, must be 1e-05"),
    ("seed_oss", {"logit_scale": 0.5}, "seed_oss.logit_scale is 0.5, seed_oss models here have none"),
    ("seed_oss", {"rope.dimension_count": 8}, "seed_oss.rope.dimension_count is 8, seed_oss models rotate whole heads"),
    ("cohere2", {"attention.sliding_window_pattern": [True]}, "must be a list with one entry for each of 4 layers"),
    ("glm4_moe", {"expert_gating_func": 1}, "glm4moe.expert_gating_func is 1, must be 2"),
    ("glm4_moe", {"expert_weights_norm": 3}, "glm4moe.expert_weights_norm is 3, must be true or false"),
    ("apertus", {"xielu.beta": [0.5]}, r"xielu.beta is \[0.5\], must be a list with a number for each of 2 layers"),
    ("nemotron", {"attention.key_length": 4}, "nemotron.attention.key_length is 4, llama.cpp computes nemotron models with 8"),
    ("deepseek_v3", {"expert_gating_func": None}, "deepseek2.expert_gating_func is missing, must be 2"),
    ("deepseek_v2", {"expert_weights_norm": True}, "deepseek2.expert_weights_norm is True, must be False"),
    ("deepseek_v2", {"attention.key_length_mla": None}, "the file has no deepseek2.attention.key_length_mla: it is an old"),
    ("deepseek_v2", {"rope.scaling.factor": 2.0}, "deepseek2.rope.scaling.type is linear, must be none or yarn"),
    ("deepseek_v3", {"rope.scaling.yarn_log_multiplier": None}, "yarn_log_multiplier is None, must be above 0"),
    ("mamba2", {"ssm.group_count": None}, "the file has no mamba2.ssm.group_count"),
    ("mamba2", {"ssm.inner_size": 65}, "mamba2.ssm.inner_size is 65, must be 64 by the rest of the file"),
    ("mamba2", {"ssm.time_step_rank": 0}, "mamba2.ssm.time_step_rank is 0, must be 1 to 320 by the tensors"),
    ("jamba", {"ssm.inner_size": 32}, "jamba.ssm.inner_size is 32, must be 64 by the rest of the file"),
    ("jamba", {"attention.head_count_kv": [0, 2]}, "must be one number, or one for each of 6 layers"),
    ("qwen3_next", {"attention.recurrent_layers": [True]}, "must be a list with one entry for each of 4 layers, true or"),
    ("qwen3_5", {"rope.dimension_sections": [2, 1, 0, 1]}, r"dimension_sections is \[2, 1, 0, 1\], must be \[2, 1, 1, 0\] by"),
    ("granite", {"attention.key_length": 2**31 - 1}, "granite.attention.key_length is 2147483647, must be 0 to 320 by the"),
    ("granite", {"attention.value_length": 8}, "granite.attention.value_length is 8, must be 16 by the rest of the file"),
    ("granite", {"logit_scale": 0.0}, "granite.logit_scale is 0, must be another number"),
    ("granite", {"attention.scale": float("nan")}, "granite.attention.scale is nan, must be a finite number"),
    ("olmo2", {"rope.freq_base": -1.0}, "olmo2.rope.freq_base is -1.0, must be above 0"),
    ("olmo2", {"context_length": None}, "the file has no olmo2.context_length"),
    ("olmo2", {"embedding_length": 0}, "olmo2.embedding_length is 0, must be 1 to 320 by the tensors of the file"),
    ("olmo2", {"expert_used_count": 2}, "olmo2.expert_used_count is 2, must be 0 without experts"),
    ("olmo2", {"expert_feed_forward_length": 32}, "expert_feed_forward_length is 32, olmo2 models here have none"),
    ("olmo2", {"vocab_size": "x"}, "olmo2.vocab_size is 'x', must be 0 or more"),
    ("glm4_moe", {"expert_used_count": None}, "the file has no glm4moe.expert_used_count"),
    ("cohere2", {"attention.sliding_window_pattern": ["x"] * 4}, "must be a list with one entry for each of 4 layers"),
    ("cohere2", {"attention.sliding_window": [8] * 4}, "must be one number: take another file"),
]  # fmt: skip


@pytest.mark.parametrize("name, changes, match", FOREIGN)
def test_metadata_that_a_family_does_not_have_are_refused(name, changes, match, tmp_path):
    path = write(tmp_path / "model.gguf", name)
    arch = gguf.GGUFReader(path).fields["general.architecture"].contents()
    values = {key if key.startswith("xielu") else f"{arch}.{key}": value for key, value in changes.items()}
    with test_gguf.one_line(match):
        open_gguf(test_gguf.copy(path, tmp_path / "other.gguf", values={"general.architecture": arch} | values))


def test_a_tokenizer_without_merges_is_left_out_with_a_warning(tmp_path):
    files, path, config = dict(gguf_cases.byte_level()), tmp_path / "model.gguf", CASES["olmo2"]
    spec = json.loads(files["tokenizer.json"])
    files["tokenizer.json"] = json.dumps(spec | {"model": spec["model"] | {"merges": []}}).encode()
    with pytest.warns(UserWarning, match="tokenizer.json has no merges, llama.cpp reads none without"):
        write_gguf(path, config, tensors(config), files)
    assert open_gguf(path).tokenizer == {}


@pytest.mark.parametrize("value", [None, 1])
def test_the_residual_of_gpt_neox_must_be_known(value, tmp_path):
    path = test_gguf.write(tmp_path / "model.gguf", "gpt_neox")
    values = {"general.architecture": "gptneox", "gptneox.use_parallel_residual": value}
    with test_gguf.one_line(f"gptneox.use_parallel_residual is {value}, must be true or false"):
        open_gguf(test_gguf.copy(path, tmp_path / "other.gguf", values=values))


def test_a_family_that_rotates_a_part_of_a_head_may_rotate_whole_ones(tmp_path):
    """config.json must say so: without, it would mean the part."""
    path = write(tmp_path / "model.gguf", "qwen3_5", rope_parameters=rope(partial_rotary_factor=1.0))
    assert hf_config.from_hf(open_gguf(path).config).rope.fraction == 1


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    path, other = write(tmp_path / "model.gguf", "olmo2"), tmp_path / "other.gguf"
    values = {"general.architecture": "olmo2"}
    tokens = {"tokenizer.ggml.tokens": ["a"] * 319}
    with test_gguf.one_line("its tokenizer has 319 tokens, must have 320, one for each row of token_embd.weight"):
        open_gguf(test_gguf.copy(path, other, values=values | tokens))
    values |= {"tokenizer.ggml.tokens": None, "olmo2.vocab_size": 321}
    with test_gguf.one_line("its tokenizer has 321 tokens"):
        open_gguf(test_gguf.copy(path, other, values=values))


def check(path: pathlib.Path, name: str, ids: list[int], best: list[Any]) -> None:
    """Compares ours with what llama.cpp generates."""
    # ggml reads GELU's tanh from a table in float16.
    activation = str(hf_config.from_hf(open_gguf(path).config).activation)
    tolerance = 2e-2 if activation.startswith(("gelu", "geglu")) else 1e-4
    ours = logits(path, prompt(name) + ids)[len(prompt(name)) - 1 : -1]
    assert len(ids) == COUNT and ours.argmax(-1).tolist() == ids
    log_probabilities = np.asarray(jax.nn.log_softmax(ours[0]))
    for token, log_probability in best:
        assert abs(log_probabilities[token] - log_probability) < tolerance


# Every third of them in `make test`.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.heavy if at % 3 else ()) for at, name in enumerate(sorted(CASES))]
)
def test_our_tokens_are_those_recorded_of_llama_cpp(name, tmp_path):
    check(write(tmp_path / "model.gguf", name), name, json.loads(RECORDED.read_text())[name], [])


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_generates_what_we_do(name, tmp_path):
    pytest.importorskip("xllamacpp")
    path = write(tmp_path / "model.gguf", name)
    check(path, name, **continued(path, name))


def kinds(name: str, dtype: str, **changes: Any) -> dict[str, str]:
    """The type of each matrix in a file, but for the usual one."""
    config = CASES[name] | changes
    family = gguf_names.of_config(config)
    wanted = family.tensors(config)
    types = gguf_types.Types.of(dtype, config, family, wanted)
    result = {tensor.stored: types.type(tensor.stored, tensor.stored_shape).name for tensor in wanted}
    return {tensor: kind for tensor, kind in result.items() if kind not in ("F32", f"{dtype[:2].upper()}_K")}


def test_mixtures_count_the_layers_that_have_values():
    """llama-quantize gives more bits to some of the layers with attention, and to some of all."""
    types = ["conv", "full_attention"] * 4
    found = kinds("lfm2", "q4_k_m", hidden_size=256, intermediate_size=512, num_hidden_layers=8, layer_types=types)
    assert {name for name in found if "attn_v" in name} == {"blk.5.attn_v.weight", "blk.7.attn_v.weight"}
    assert {name for name in found if "ffn_down" in name} == {f"blk.{i}.ffn_down.weight" for i in (0, 3, 6, 7)}
    found = kinds("falcon", "q4_k_m", hidden_size=256, ffn_hidden_size=512, num_hidden_layers=16)
    assert found["blk.0.ffn_down.weight"] == "Q6_K" and found["blk.1.ffn_down.weight"] == "Q5_K"
    assert found["token_embd.weight"] == "Q8_0"


# Sizes with rows of blocks.
WIDE = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4)
QUANTIZED = {
    "granite": WIDE,
    "falcon": dict(hidden_size=256, ffn_hidden_size=512),
    "glm4": WIDE,
    "deepseek_v3": dict(hidden_size=256, moe_intermediate_size=256, kv_lora_rank=256, q_lora_rank=256),
    "granitemoehybrid": dict(hidden_size=256, intermediate_size=256, shared_intermediate_size=512, mamba_d_head=64),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", QUANTIZED)
def test_llama_cpp_reads_k_quants_of_a_family(name, tmp_path):
    """It rounds what it multiplies with quantized weights to 8 bits, so that its numbers are near ours."""
    pytest.importorskip("xllamacpp")
    path = write(tmp_path / "model.gguf", name, "q4_k_m", **QUANTIZED[name])
    answer = continued(path, name)
    ours = np.asarray(jax.nn.log_softmax(logits(path, prompt(name))[-1]))
    assert answer["best"] and answer["ids"]
    theirs = np.array([log_probability for _, log_probability in sorted(answer["best"])])
    assert np.corrcoef(ours, theirs)[0, 1] > 0.95


def test_the_pages_name_all_families():
    page = (HERE.parents[1] / "docs" / "models.md").read_text()
    line = page.partition("\nGGUF is read and written for")[2].partition("\n\n")[0]
    assert gguf_names.OWN <= set(line.replace(",", " ").replace(".", " ").split())


def test_a_family_is_registered_once(monkeypatch):
    monkeypatch.setattr(gguf_names, "FAMILIES", [*gguf_names.FAMILIES])
    (olmo,) = (family for family in gguf_names.FAMILIES if family.model_type == "olmo")
    with pytest.raises(UserError, match="a GGUF family of model_type 'olmo' already"):
        gguf_names.add(olmo)
    with pytest.raises(UserError, match="'mine' has no Hugging Face family"):
        gguf_names.add(dataclasses.replace(olmo, model_type="mine"))
    for _ in range(2):  # a notebook may run the cell again
        gguf_names.add(dataclasses.replace(olmo, model_type="gptj"))
    assert [family.model_type for family in gguf_names.FAMILIES].count("gptj") == 1
    assert gguf_names.of_config({"model_type": "gptj"}).arch == "olmo"


def record(names: list[str]) -> None:
    """Writes the tokens that llama.cpp generates."""
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            recorded[name] = continued(write(pathlib.Path(folder) / "model.gguf", name), name)["ids"]
    lines = [f"{json.dumps(name)}: {json.dumps(ids)}" for name, ids in sorted(recorded.items())]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record(sys.argv[1:] or list(CASES))
