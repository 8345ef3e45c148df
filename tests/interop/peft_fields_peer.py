"""Writes peft_fields.json: PEFT's fields, and what PEFT answers when it loads adapters that use them on a fresh base.

PYTHON_WITH_PEFT tests/interop/peft_fields_peer.py record FILE    (peft 0.21.2, transformers 5.24 made the committed one)
PYTHON_WITH_PEFT tests/interop/peft_fields_peer.py sweep FOLDER  adapters of fields drawn at random in FOLDER/NUMBER
PYTHON_WITH_PEFT tests/interop/peft_fields_peer.py read FOLDER    logits of FOLDER/*/adapter on FOLDER/*/base, in
                                                                  FOLDER/*/logits.json
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import pathlib
import re
import sys
import tempfile
import warnings
from typing import Any, NamedTuple

import numpy as np
import peft
import safetensors.torch
import torch
import transformers
from peft.tuners.lora import config as lora_configs

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "models" / "golden"))
from answers import draw  # noqa: E402

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SIZES = dict(vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2)
LLAMA = dict(model_type="llama", **SIZES, num_key_value_heads=1, head_dim=8, tie_word_embeddings=False)
BASES = {
    "untied": LLAMA,
    "tied": LLAMA | dict(tie_word_embeddings=True),
    "biased": LLAMA | dict(model_type="qwen2"),
    "gemma": LLAMA | dict(model_type="gemma", tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh"),
    "gpt2": dict(model_type="gpt2", vocab_size=24, n_embd=16, n_inner=24, n_layer=3, n_head=2, n_positions=32),
    "neox": dict(model_type="gpt_neox", **SIZES, tie_word_embeddings=True),
    "experts": LLAMA | dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, head_dim=None),
    "t5": dict(model_type="t5", vocab_size=24, d_model=16, d_ff=24, d_kv=8, num_layers=2, num_heads=2),
}
TOKENS = np.random.default_rng(0).integers(1, 24, (2, 8))
POSITIONS, ENTRIES = (2, 5, 7), (0, 3, 9, 14, 20, 23)


class Case(NamedTuple):
    """An adapter.

    Attributes:
      base: a key of BASES.
      options: of LoraConfig.
      changes: to the saved adapter_config.json, of values that cannot be made here.
      refused: the field that we name in an error instead; "": we answer as PEFT.
    """

    base: str
    options: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    refused: str = ""


def _init(value: Any, base: str = "untied", **options: Any) -> Case:
    return Case(base, dict(init_lora_weights=value, target_modules=["q_proj", "down_proj"]) | options)


BD = lora_configs.BdLoraConfig
EMBED, HEAD, BOTH = ["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]
TIE = dict(ensure_weight_tying=True)
CASES: dict[str, Case] = {
    "task_type:null": Case("untied", dict(task_type=None)),
    "task_type:features": Case("untied", dict(task_type="FEATURE_EXTRACTION")),
    "task_type:classes": Case("untied", {}, dict(task_type="TOKEN_CLS"), "task_type"),
    "peft_type:other": Case("untied", {}, dict(peft_type="IA3"), "peft_type"),
    "auto_mapping": Case("untied", {}, dict(auto_mapping=dict(base_model_class="LlamaForCausalLM"))),
    "peft_version": Case("untied", {}, dict(peft_version="0.4.0")),
    "base_model_name_or_path": Case("untied", {}, dict(base_model_name_or_path="org/name")),
    "revision": Case("untied", dict(revision="v2")),
    "inference_mode": Case("untied", {}, dict(inference_mode=False)),
    "r:1": Case("untied", dict(r=1)),
    "r:7": Case("untied", dict(r=7)),
    "target_modules:regex": Case("untied", dict(target_modules=r"model\.layers\.(0\.self_attn\.[qk]|\d\.mlp\.up)_proj")),
    "target_modules:all": Case("untied", dict(target_modules="all-linear")),
    "exclude_modules:list": Case("untied", dict(exclude_modules=["layers.1.self_attn.v_proj"])),
    "exclude_modules:regex": Case("untied", dict(exclude_modules=r".*\.2\.self_attn\.q_proj")),
    "lora_alpha:1": Case("untied", dict(lora_alpha=1)),
    "lora_alpha:real": Case("untied", dict(lora_alpha=5.5)),
    "lora_dropout": Case("untied", dict(lora_dropout=0.3)),
    "fan_in_fan_out:linear": Case("untied", {}, dict(fan_in_fan_out=True)),
    "fan_in_fan_out:conv": Case("gpt2", dict(target_modules=["c_attn", "mlp.c_proj"]), dict(fan_in_fan_out=False)),
    "bias:all": Case("biased", dict(bias="all")),
    "bias:lora_only": Case("biased", dict(bias="lora_only")),
    "use_rslora": Case("untied", dict(use_rslora=True, rank_pattern={"q_proj": 2})),
    "modules_to_save": Case("untied", dict(modules_to_save=["input_layernorm", "norm"])),
    "modules_to_save:absent": Case("untied", dict(modules_to_save=["classifier", "o_proj"])),
    "init_lora_weights:false": _init(False),
    "init_lora_weights:null": Case("untied", {}, dict(init_lora_weights=None)),
    "init_lora_weights:gaussian": _init("gaussian"),
    "init_lora_weights:eva": _init("eva", eva_config=peft.EvaConfig(rho=1.5)),
    "init_lora_weights:olora": _init("olora"),
    "init_lora_weights:olora_rslora": _init("olora", use_rslora=True),
    "init_lora_weights:pissa": _init("pissa"),
    "init_lora_weights:pissa_dora": _init("pissa", use_dora=True),
    "init_lora_weights:pissa_ranks": _init("pissa", rank_pattern={"layers.1.self_attn.q_proj": 2}),
    "init_lora_weights:pissa_conv": Case("gpt2", dict(init_lora_weights="pissa", target_modules=["c_attn"])),
    "init_lora_weights:pissa_head": _init("pissa", target_modules=["q_proj", "lm_head"]),
    "init_lora_weights:orthogonal": _init("orthogonal"),
    "init_lora_weights:mica": _init("mica"),
    "init_lora_weights:pissa_niter": _init("pissa_niter_4")._replace(refused="init_lora_weights"),
    "init_lora_weights:corda": Case("untied", {}, dict(init_lora_weights="corda"), "init_lora_weights"),
    "init_lora_weights:loftq": Case(
        "untied", {}, dict(init_lora_weights="loftq", loftq_config=dict(loftq_bits=4, loftq_iter=1)), "init_lora_weights"
    ),
    "init_lora_weights:lora_ga": Case("untied", {}, dict(init_lora_weights="lora_ga"), "init_lora_weights"),
    "init_lora_weights:unknown": Case("untied", {}, dict(init_lora_weights="new"), "init_lora_weights"),
    "layers_to_transform:list": Case("untied", dict(layers_to_transform=[0, 2])),
    "layers_to_transform:one": Case("untied", dict(layers_to_transform=1)),
    "layers_pattern:other": Case("gpt2", dict(target_modules=["c_attn"], layers_to_transform=[0, 1], layers_pattern="h")),
    "layers_pattern": Case("untied", dict(layers_to_transform=[1], layers_pattern=["layers"])),
    "rank_pattern:regex": Case("untied", dict(rank_pattern={r".*\.v_\w+": 2, r"^model\.layers\.1\..*": 3})),
    "alpha_pattern:regex": Case("untied", dict(alpha_pattern={r"layers\.[01]\.self_attn\.q_proj": 3, "v_proj": 1.5})),
    "megatron_config": Case("untied", {}, dict(megatron_config=dict(hidden_size=16)), "megatron_config"),
    "megatron_core": Case("untied", dict(megatron_core="own.core")),
    "loftq_config": Case("untied", {}, dict(loftq_config=dict(loftq_bits=8, loftq_iter=2))),
    "eva_config": Case("untied", dict(eva_config=peft.EvaConfig())),
    "corda_config": Case("untied", dict(corda_config=lora_configs.CordaConfig(corda_method="kpm"))),
    "lora_ga_config": Case("untied", dict(lora_ga_config=lora_configs.LoraGAConfig(direction="ArBr"))),
    "use_dora": Case("untied", dict(use_dora=True)),
    "velora_config": Case("untied", dict(velora_config=lora_configs.VeloraConfig(num_groups=4, init_type="random"))),
    "alora_invocation_tokens": Case("untied", dict(alora_invocation_tokens=[3, 5]), {}, "alora_invocation_tokens"),
    "alora_invocation_tokens:empty": Case("untied", {}, dict(alora_invocation_tokens=[])),
    "use_qalora": Case("untied", {}, dict(use_qalora=True), "use_qalora"),
    "qalora_group_size": Case("untied", dict(qalora_group_size=8)),
    "monteclora_config": Case("untied", dict(monteclora_config=lora_configs.MontecloraConfig(num_samples=2))),
    "layer_replication": Case("untied", dict(layer_replication=[(0, 2), (1, 3)])),
    "layer_replication:fewer": Case("tied", dict(layer_replication=[(2, 3), (0, 1)])),
    "runtime_config": Case("untied", {}, dict(runtime_config=dict(ephemeral_gpu_offload=True))),
    "lora_bias": Case("biased", dict(lora_bias=True)),
    "lora_bias:new": Case("untied", dict(lora_bias=True), {}, "lora_bias"),
    "target_parameters": Case("untied", dict(target_modules=["o_proj"], target_parameters=["mlp.up_proj.weight"])),
    "target_parameters:patterns": Case(
        "untied",
        dict(
            target_modules=["o_proj"],
            target_parameters=["mlp.up_proj.weight", "mlp.down_proj.weight"],
            rank_pattern={"down_proj.weight": 2, "o_proj": 3},
            alpha_pattern={"up_proj": 3, r"\w+\.weight": 5},
        ),
    ),
    "target_parameters:experts": Case(
        "experts", dict(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    ),
    "use_bdlora": Case(
        "untied",
        dict(
            target_modules=["q_proj", "down_proj", "up_proj"],
            use_bdlora=BD(target_modules_bd_a=["q_proj"], target_modules_bd_b=["down"], nblocks=2, match_strict=False),
        ),
    ),
    "arrow_config": Case("untied", {}, dict(arrow_config=dict(top_k=2)), "arrow_config"),
    "arrow_config:empty": Case("untied", {}, dict(arrow_config={}), "arrow_config"),
    "kasa_config": Case("untied", dict(kasa_config=lora_configs.KasaConfig(), use_rslora=True)),
    # Embedding and head.
    "modules_to_save:embedding": Case("untied", dict(modules_to_save=EMBED)),
    "modules_to_save:head": Case("untied", dict(modules_to_save=HEAD)),
    "modules_to_save:ends": Case("untied", dict(modules_to_save=BOTH)),
    "modules_to_save:tied_embedding": Case("tied", dict(modules_to_save=EMBED)),
    "modules_to_save:tied_head": Case("tied", dict(modules_to_save=HEAD)),
    "modules_to_save:tied_ends": Case("tied", dict(modules_to_save=BOTH)),
    "modules_to_save:gpt2": Case("gpt2", dict(modules_to_save=["wte"], target_modules=["c_attn"])),
    "modules_to_save:t5": Case(
        "t5", dict(task_type="SEQ_2_SEQ_LM", target_modules=["q"], modules_to_save=["shared", "embed_tokens", "lm_head"])
    ),
    "modules_to_save:t5_shared": Case(
        "t5", dict(task_type="SEQ_2_SEQ_LM", target_modules=["q"], modules_to_save=["shared"]), {}, "modules_to_save"
    ),
    "ensure_weight_tying:embedding": Case("tied", dict(modules_to_save=EMBED, **TIE)),
    "ensure_weight_tying:head": Case("tied", dict(modules_to_save=HEAD, **TIE)),
    "ensure_weight_tying:ends": Case("tied", dict(modules_to_save=BOTH, **TIE)),
    "ensure_weight_tying:none": Case("tied", TIE),
    "ensure_weight_tying:untied": Case("untied", dict(modules_to_save=EMBED, **TIE)),
    "ensure_weight_tying:target_embedding": Case("tied", dict(target_modules=["q_proj", *EMBED], **TIE)),
    "ensure_weight_tying:target_head": Case("tied", dict(target_modules=["q_proj", *HEAD], **TIE)),
    "ensure_weight_tying:target_ends": Case("tied", dict(target_modules=["q_proj", *BOTH], **TIE)),
    "ensure_weight_tying:tokens": Case("tied", dict(trainable_token_indices=[3, 7], **TIE)),
    "target_modules:embedding": Case("untied", dict(target_modules=["q_proj", *EMBED])),
    "target_modules:only_embedding": Case("untied", dict(target_modules=EMBED)),
    "target_modules:head": Case("untied", dict(target_modules=["q_proj", *HEAD], use_rslora=True)),
    "target_modules:ends": Case("untied", dict(target_modules=["q_proj", *BOTH], alpha_pattern={"lm_head": 2})),
    "target_modules:ends_dora": Case("untied", dict(target_modules=["q_proj", *BOTH], use_dora=True)),
    "target_modules:tied_embedding": Case("tied", dict(target_modules=["q_proj", *EMBED])),
    "target_modules:tied_head": Case("tied", dict(target_modules=["q_proj", *HEAD])),
    "target_modules:tied_ends": Case("tied", dict(target_modules=["q_proj", *BOTH])),
    "target_modules:gemma": Case("gemma", dict(target_modules=["q_proj", *EMBED])),
    "target_modules:neox": Case("neox", dict(target_modules=["query_key_value", "embed_in"])),
    "target_modules:gpt2": Case("gpt2", dict(target_modules=["c_attn", "wte"])),
    "trainable_token_indices:list": Case("untied", dict(trainable_token_indices=[5, 2])),
    "trainable_token_indices:dict": Case("untied", dict(trainable_token_indices=dict(embed_tokens=[5, 2]))),
    "trainable_token_indices:head": Case("untied", dict(trainable_token_indices=dict(lm_head=[5, 2]))),
    "trainable_token_indices:ends": Case("untied", dict(trainable_token_indices=dict(embed_tokens=[5], lm_head=[1, 2]))),
    "trainable_token_indices:tied": Case("tied", dict(trainable_token_indices=[5, 2])),
    "trainable_token_indices:tied_head": Case("tied", dict(trainable_token_indices=dict(lm_head=[5, 2]))),
    "trainable_token_indices:tied_ends": Case(
        "tied", dict(trainable_token_indices=dict(embed_tokens=[5, 2], lm_head=[5, 2]))
    ),
    "trainable_token_indices:tied_others": Case(
        "tied", dict(trainable_token_indices=dict(embed_tokens=[5], lm_head=[1, 2]))
    ),
    "trainable_token_indices:gemma": Case("gemma", dict(trainable_token_indices=[5, 2])),
    "trainable_token_indices:gpt2": Case("gpt2", dict(trainable_token_indices=[5, 2], target_modules=["c_attn"])),
}  # fmt: skip


def model_of(name: str) -> torch.nn.Module:
    """A base with drawn weights."""
    values = dict(BASES[name])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.copy_(torch.from_numpy(draw(key, tuple(value.shape))))
    model.config.name_or_path = model.name_or_path = ""
    return model.eval()


def logits_of(model: torch.nn.Module, name: str) -> np.ndarray:
    tokens = torch.from_numpy(TOKENS)
    given = dict(decoder_input_ids=tokens) if name == "t5" else dict(use_cache=False)
    with torch.no_grad():
        return model(input_ids=tokens, **given).logits.numpy()


def plain(value: Any) -> Any:
    """A value as JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: plain(x) for key, x in dataclasses.asdict(value).items()}
    if isinstance(value, enum.Enum):
        return value.value
    return sorted(value) if isinstance(value, set) else value


def fields_of(kind: type) -> dict[str, Any]:
    """Names and default values of a configuration's fields."""
    found = {}
    for field in dataclasses.fields(kind):
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        found[field.name] = plain(default)
    return found


def answer(case: Case) -> dict[str, Any]:
    """The files of an adapter, but for the tensors' values, and the logits of PEFT with drawn ones."""
    options = dict(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    if case.base in ("gpt2", "neox"):
        options["target_modules"] = ["c_attn"]
    found: dict[str, Any] = {"base": case.base}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        config = peft.LoraConfig(**options | copy.deepcopy(case.options))
        peft.get_peft_model(model_of(case.base), config).save_pretrained(folder)
        values = json.loads((path / CONFIG).read_text()) | case.changes
        (path / CONFIG).write_text(json.dumps(values))
        stored = safetensors.torch.load_file(path / WEIGHTS)
        alike = [key for key in stored if case.base == "t5" and re.search(r"embed_tokens|lm_head|shared", key)]
        drawn = {
            key: torch.from_numpy(draw(alike[0] if key in alike else key, tuple(value.shape)))
            for key, value in stored.items()
        }
        safetensors.torch.save_file(drawn, path / WEIGHTS, metadata={"format": "pt"})
        defaults = fields_of(peft.LoraConfig)
        found["config"] = {key: value for key, value in values.items() if value != defaults.get(key, ())}
        found["tensors"] = {key: list(value.shape) for key, value in stored.items()}
        try:
            model = peft.PeftModel.from_pretrained(model_of(case.base), folder)
            got = logits_of(model.eval(), case.base)
        except Exception as error:  # what PEFT cannot load
            if not case.refused:
                raise
            return found | {"refused": case.refused, "peft": type(error).__name__}
        if case.refused:
            return found | {"refused": case.refused}
        shared = shares(model, drawn)
        shared |= {key: [alike[0], False] for key in alike[1:]}
        if shared:
            found["shared"] = shared
        found["logits"] = np.round(got[-1][np.ix_(POSITIONS, ENTRIES)].astype(float), 5).tolist()
    return found


def shares(model: torch.nn.Module, drawn: dict[str, torch.Tensor]) -> dict[str, list]:
    """Tensors whose values another one has overwritten: name -> [the other one, whether it is transposed]."""
    found = {}
    for key, value in peft.get_peft_model_state_dict(model).items():
        if torch.equal(value, drawn[key]):
            continue
        for other, theirs in drawn.items():
            for turned in (False, True):
                if (theirs.T if turned else theirs).shape == value.shape and torch.equal(
                    theirs.T if turned else theirs, value
                ):
                    found[key] = [other, turned]
        assert key in found, key
    return found


def record(file: pathlib.Path) -> None:
    answers = {}
    for name, case in CASES.items():
        answers[name] = answer(case)
        print(
            name,
            answers[name].get("refused", ""),
            answers[name].get("peft", ""),
            answers[name].get("shared", ""),
            flush=True,
        )
    kinds = {name: kind for name, kind in vars(lora_configs).items() if dataclasses.is_dataclass(kind)}
    head = {
        "peft": peft.__version__,
        "transformers": transformers.__version__,
        "fields": fields_of(peft.LoraConfig),
        "types": {field.name: str(field.type) for field in dataclasses.fields(peft.LoraConfig)},
        "configs": {name: fields_of(kind) for name, kind in kinds.items() if name not in ("LoraConfig", "PeftConfig")},
        "bases": BASES,
        "tokens": TOKENS.tolist(),
        "positions": list(POSITIONS),
        "entries": list(ENTRIES),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines.append('"cases": {\n' + ",\n".join(f"{json.dumps(key)}: {json.dumps(x)}" for key, x in answers.items()) + "}")
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


MODULES = {
    "gpt2": ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
    "neox": ("query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h"),
}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SWEPT = ("untied", "tied", "biased", "gemma", "gpt2", "neox")


def drawn_options(rng: np.random.Generator, base: str) -> dict[str, Any]:
    """Options of LoraConfig at random, also some that PEFT refuses."""
    modules = MODULES.get(base, LAYERS)
    ends = {"gpt2": ("wte", "lm_head"), "neox": ("embed_in", "lm_head")}.get(base, ("embed_tokens", "lm_head"))
    norms = {"gpt2": ("ln_1", "ln_f"), "neox": ("input_layernorm",)}.get(base, ("input_layernorm", "model.norm"))
    layer = {"gpt2": r"h\.", "neox": r"layers\."}.get(base, r"layers\.")
    some = lambda values, most: [str(x) for x in rng.permutation(values)[: rng.integers(1, most + 1)]]  # noqa: E731
    maybe = lambda share: rng.random() < share  # noqa: E731
    options: dict[str, Any] = dict(r=int(rng.integers(1, 6)), lora_alpha=round(float(rng.uniform(1, 9)), 2))
    options["target_modules"] = some(modules, 4) + (some(ends, 2) if maybe(0.3) else [])
    if maybe(0.1):
        options["target_modules"] = (
            rf".*\.{layer}[02]\..*\.({'|'.join(x.replace('.', '[.]') for x in some(modules, 3))})"
        )
    keys = [rf".*{layer}[01]\..*", *some(modules, 2), *ends, rf"{layer}\d\.\w+\.{modules[0]}"]
    if maybe(0.4):
        options["rank_pattern"] = {key: int(rng.integers(1, 6)) for key in some(keys, 2)}
    if maybe(0.4):
        options["alpha_pattern"] = {key: round(float(rng.uniform(1, 9)), 2) for key in some(keys, 3)}
    if maybe(0.2) and isinstance(options["target_modules"], list):
        options["layers_to_transform"] = [[0, 2], 1, [2]][rng.integers(3)]
    if maybe(0.15):
        options["exclude_modules"] = [some(modules, 1), rf".*{layer}1\..*"][rng.integers(2)]
    if maybe(0.3):
        options["modules_to_save"] = some([*norms, *ends], 2)
    if maybe(0.3):
        options["ensure_weight_tying"] = True
    if maybe(0.2):
        ids = [int(x) for x in rng.permutation(24)[:3]]
        options["trainable_token_indices"] = [ids, {ends[0]: ids}, {ends[1]: ids}, {ends[0]: ids, ends[1]: ids[:2]}][
            rng.integers(4)
        ]
    options |= dict(use_rslora=maybe(0.3), bias=str(rng.choice(["none", "none", "all", "lora_only"])))
    if maybe(0.4):
        options["init_lora_weights"] = [False, "gaussian", "pissa", "pissa", "olora", "olora", "mica", "orthogonal"][
            rng.integers(8)
        ]
    variant = rng.integers(12)
    if variant < 3:
        options["use_dora"] = True
    elif variant == 3:
        options["kasa_config"] = lora_configs.KasaConfig()
    elif variant == 4:
        options["monteclora_config"] = lora_configs.MontecloraConfig(num_samples=2)
    elif variant == 5:
        options["velora_config"] = lora_configs.VeloraConfig(num_groups=4)
    elif variant == 6:
        blocks = [BD(target_modules_bd_a=[modules[0]], nblocks=1, match_strict=False)]
        blocks.append(
            BD(target_modules_bd_b=[modules[-1]], target_modules_bd_a=[modules[1]], nblocks=2, match_strict=False)
        )
        options["use_bdlora"] = blocks[rng.integers(2)]
    elif variant == 7:
        options["lora_bias"] = True
    if maybe(0.08):
        options["layer_replication"] = [(0, 2), (1, 3)]
    return options


def sweep(folder: pathlib.Path, seed: int = 0, count: int = 250) -> None:
    """Writes adapters with fields at random, as far as PEFT has them, and its logits."""
    rng, made = np.random.default_rng(seed), 0
    while made < count:
        base = str(rng.choice(SWEPT))
        options = drawn_options(rng, base)
        path = folder / str(made) / "adapter"
        path.mkdir(parents=True, exist_ok=True)
        try:
            config = peft.LoraConfig(task_type="CAUSAL_LM", **copy.deepcopy(options))
            peft.get_peft_model(model_of(base), config).save_pretrained(path)
            shapes = {key: tuple(value.shape) for key, value in safetensors.torch.load_file(path / WEIGHTS).items()}
            drawn = {key: torch.from_numpy(draw(key, shape)) for key, shape in shapes.items()}
            safetensors.torch.save_file(drawn, path / WEIGHTS, metadata={"format": "pt"})
            got = logits_of(peft.PeftModel.from_pretrained(model_of(base), path).eval(), base)
        except Exception:  # PEFT has no such adapter, or cannot load it
            continue
        answer = {"base": base, "logits": got[-1][np.ix_(POSITIONS, ENTRIES)].astype(float).tolist()}
        (folder / str(made) / "answer.json").write_text(json.dumps(answer))
        made += 1


def read(folder: pathlib.Path) -> None:
    for path in sorted(folder.iterdir()):
        kind = transformers.AutoModelForSeq2SeqLM if path.name == "t5" else transformers.AutoModelForCausalLM
        base = kind.from_pretrained(path / "base", attn_implementation="eager", dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, path / "adapter").eval()
        (path / "logits.json").write_text(json.dumps(logits_of(model, path.name).tolist()))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    {"record": record, "sweep": sweep, "read": read}[sys.argv[1]](pathlib.Path(sys.argv[2]))
