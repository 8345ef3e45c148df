"""Encoders with BERT's layers and head: ELECTRA's generators, ERNIE (Baidu 2019), RoFormer, Megatron's BERT and DistilBERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.interop.hf.layout.family import LAYER_NORM, WITHOUT_GROUPS, Family, Kind, Values
from capibara.interop.hf.layout.rows import A, Constant, M, Names, linear, norm, renamed, rows, without
from capibara.interop.hf.tables import BERT
from capibara.kernels.rotary import Pairs
from capibara.models.api import EncoderConfig, Rope, TransformerConfig, sine_table

KEYS = WITHOUT_GROUPS | LAYER_NORM | {"max_length": "max_position_embeddings", "token_types": "type_vocab_size"}
DEFAULTS: dict[str, Any] = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}
DEFAULTS |= {"max_position_embeddings": 512}
ENCODER: dict[str, Any] = {"kind": Kind.ENCODER, "tied": True, "gated": False, "rope": False, "divides": True}
# What transformers 4 computes, and what makes a decoder.
ONLY = {"position_embedding_type": ("absolute",), "is_decoder": (False,), "add_cross_attention": (False,)}
HEAD_BIAS = {"cls.predictions.decoder.bias": "cls.predictions.bias"}


def renames(stem: str) -> tuple[tuple[str, str], ...]:
    """Names of a checkpoint without its head, and of norms in the first ones, -> those of today."""
    bare = (r"^(?=(?:embeddings|embeddings_project|encoder|transformer|LayerNorm)\.)", f"{stem}.")
    return bare, (r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")


def ignored(*names: str) -> str:
    """The pattern of position numbers, and of tensors that stand for another."""
    return "|".join([r"\.position_ids$", *(f"^{name}$".replace(".", r"\.") for name in names)])


def encoder(config: TransformerConfig) -> EncoderConfig:
    """The configuration of an encoder's family."""
    assert isinstance(config, EncoderConfig), "the family's kind"
    return config


def _read_width(values: Values) -> dict[str, Any]:
    """Embeddings as wide as the layers have no projection."""
    width = values["embedding_size"]
    return {"embedding_dim": None if width == values["hidden_size"] else width}


def _read_rotary(values: Values) -> dict[str, Any]:
    """The embeddings' width is that of the layers if it is not given; rotary positions have no keys."""
    width = values.get("embedding_size") or values["hidden_size"]
    return _read_width({**values, "embedding_size": width}) | {"positions": "rope", "rope": Rope(pairs=Pairs.ADJACENT)}


def _sizes(values: Mapping[str, Any]) -> tuple[int, int]:
    return values["max_position_embeddings"], values["hidden_size"] // values["num_attention_heads"]


def _read_tasks(values: Values) -> dict[str, Any]:
    return {"task_types": values["task_type_vocab_size"] if values.get("use_task_id") else 0}


def _write_tasks(config: TransformerConfig) -> dict[str, Any]:
    tasks = encoder(config).task_types
    return {"use_task_id": tasks > 0} | ({"task_type_vocab_size": tasks} if tasks else {})


_LAYER = "distilbert.transformer.layer.{l}."
_DISTILBERT = renamed(without(BERT, "encoder", "cls.", "token_type"), ("bert.", "distilbert.")) + rows(
    [
        *linear(f"{_LAYER}attention.q_lin", "nh d", A + "query"),
        *linear(f"{_LAYER}attention.k_lin", "nh d", A + "key"),
        *linear(f"{_LAYER}attention.v_lin", "nh d", A + "value"),
        *linear(f"{_LAYER}attention.out_lin", "d nh", A + "out"),
        *norm(f"{_LAYER}sa_layer_norm", "layers/attention_norm"),
        *linear(f"{_LAYER}ffn.lin1", "f d", M + "up"),
        *linear(f"{_LAYER}ffn.lin2", "d f", M + "down"),
        *norm(f"{_LAYER}output_layer_norm", "layers/mlp_norm"),
        ("vocab_transform.weight", "o d", "transform"),
        ("vocab_transform.bias", "d", "transform_bias"),
        *norm("vocab_layer_norm", "transform_norm"),
        ("vocab_projector.weight", "v d", "output"),
        ("vocab_projector.bias", "v", "output_bias"),
    ]
)
_ELECTRA = renamed(without(BERT, "cls."), ("bert.", "electra.")) + rows(
    [
        ("electra.embeddings_project.weight", "d o", "projection"),
        ("electra.embeddings_project.bias", "d", "projection_bias"),
        ("generator_predictions.dense.weight", "o d", "transform"),
        ("generator_predictions.dense.bias", "d", "transform_bias"),
        *norm("generator_predictions.LayerNorm", "transform_norm"),
        ("generator_lm_head.weight", "v d", "output"),
        ("generator_lm_head.bias", "v", "output_bias"),
    ]
)
_ERNIE = renamed(BERT, ("bert.", "ernie.")) + rows(
    [("ernie.embeddings.task_type_embeddings.weight", "t d", "task_embedding")]
)
_BLOCK = "bert.encoder.layer.{l}."
_MEGATRON = without(BERT, "embeddings.LayerNorm", "output.LayerNorm") + rows(
    [
        *norm(f"{_BLOCK}attention.ln", "layers/attention_norm"),
        *norm(f"{_BLOCK}ln", "layers/mlp_norm"),
        *norm("bert.encoder.ln", "final_norm"),
    ]
)
_ROFORMER = renamed(without(BERT, ".position_embeddings"), ("bert.", "roformer.")) + rows(
    [
        ("roformer.embeddings_project.weight", "d o", "projection"),
        ("roformer.embeddings_project.bias", "d", "projection_bias"),
    ]
)
_ANGLES = "roformer.encoder.embed_positions.weight"
_DISTILLED = {"embed_dim": "dim", "num_layers": "n_layers", "num_heads": "n_heads", "mlp_dim": "hidden_dim"}

FAMILIES = (
    (
        # Its discriminators have the same layers, and no head that predicts tokens.
        Family(
            model_type="electra",
            architectures=("ElectraForMaskedLM",),
            keys=KEYS,
            fixed={"transform_activation": "gelu_exact"},
            defaults=DEFAULTS | {"embedding_size": 128},
            only=ONLY,
            read=_read_width,
            write=lambda config: {"embedding_size": encoder(config).embedding_width},
            **ENCODER,
        ),
        Names(_ELECTRA, renames("electra"), ignored(), r"^discriminator_predictions\."),
    ),
    (
        Family(
            model_type="ernie",
            architectures=("ErnieForMaskedLM", "ErnieForPreTraining"),
            keys=KEYS,
            read_keys=("use_task_id", "task_type_vocab_size"),
            defaults=DEFAULTS | {"task_type_vocab_size": 3},
            only=ONLY,
            read=_read_tasks,
            write=_write_tasks,
            **ENCODER,
        ),
        Names(
            _ERNIE,
            renames("ernie"),
            ignored(*HEAD_BIAS),
            r"^ernie\.pooler\.|^cls\.seq_relationship\.",
            aliases=HEAD_BIAS,
        ),
    ),
    (
        # RoFormer (Su et al. 2021, arXiv:2104.09864).
        Family(
            model_type="roformer",
            architectures=("RoFormerForMaskedLM",),
            keys=KEYS,
            defaults=DEFAULTS | {"max_position_embeddings": 1536},
            only={"rotary_value": (False,), "is_decoder": (False,), "add_cross_attention": (False,)},
            read_keys=("embedding_size",),
            read=_read_rotary,
            write=lambda config: {"embedding_size": encoder(config).embedding_width},
            **ENCODER,
        ),
        Names(
            _ROFORMER,
            renames("roformer"),
            ignored(*HEAD_BIAS, _ANGLES),
            r"^roformer\.pooler\.",
            aliases=HEAD_BIAS,
            constants={rf"^{_ANGLES}$": Constant(_sizes, lambda values, layer: sine_table(*_sizes(values)))},
        ),
    ),
    (
        Family(
            model_type="megatron-bert",
            architectures=("MegatronBertForMaskedLM", "MegatronBertForPreTraining"),
            keys=KEYS,
            fixed={"norm_placement": "pre", "embedding_norm": "none"},
            defaults=DEFAULTS,
            only=ONLY,
            **ENCODER,
        ),
        Names(
            _MEGATRON,
            renames("bert"),
            ignored(*HEAD_BIAS),
            r"^bert\.pooler\.|^cls\.seq_relationship\.",
            aliases=HEAD_BIAS,
        ),
    ),
    (
        # Its epsilon is no key, and it has no token types.
        Family(
            model_type="distilbert",
            architectures=("DistilBertForMaskedLM",),
            keys={"vocab_size": "vocab_size", "max_length": "max_position_embeddings"} | _DISTILLED,
            fixed={"norm_eps": 1e-12, "token_types": 0},
            defaults={"activation": "gelu", "max_position_embeddings": 512},
            aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
            activation="activation",
            **ENCODER,
        ),
        Names(_DISTILBERT, renames("distilbert"), ignored()),
    ),
)
