"""What is compiled for which slice: models, meshes, and the run whose programs they are."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara import sharding
from capibara.data.chat.answers import PreferenceJsonlSource, PromptJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.packing.packing import Packing
from capibara.data.sources.sources import StdlibSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.api import (
    DecoderConfig,
    DeepseekV4Config,
    EncoderConfig,
    EncoderDecoderConfig,
    GatedDelta,
    Gemma3nConfig,
    Indexer,
    LatentAttention,
    Lora,
    Moe,
    Rope,
    StreamingHeads,
)
from capibara.objectives.preference import Dpo
from capibara.optim import Optimizer
from capibara.planner.hardware import topology
from capibara.sharding import Plan
from capibara.strategies.distillation.loss import Distillation
from capibara.strategies.distillation.teacher import Teacher
from capibara.strategies.duo_attention.loss import DuoAttention
from capibara.strategies.grpo import Grpo
from capibara.strategies.rewards.functions import exact_answer
from capibara.training import setup
from capibara.training.trainer import Trainer

ROWS, LENGTH = 16, 256
SIZES = dict(vocab_size=512, embed_dim=256, num_layers=2, num_heads=8, head_dim=128, mlp_dim=512, dtype="bfloat16")
DECODER = DecoderConfig(**SIZES, num_kv_heads=4)
EXPERTS = dataclasses.replace(DECODER, moe=Moe(num_experts=4, top_k=2, expert_dim=256))
GEMMA3N = Gemma3nConfig(
    **SIZES | dict(num_layers=5),
    num_kv_heads=4,
    layer_pattern=("local", "global"),
    window=128,
    logit_soft_cap=30.0,
    laurel_rank=64,
    per_layer_dim=64,
    per_layer_vocab_size=512,
    kv_shared_layers=2,
    activation_sparsity=(0.95,),
)
LORA = Lora(rank=8, targets=("all-linear",), base_dtype="bfloat16")
# Weights of 1024 inputs have enough blocks for their scales to be spread over devices.
QLORA = dict(embed_dim=1024, lora=dataclasses.replace(LORA, base_dtype="nf4", double_quantization=True))
MODELS = {
    "decoder": DECODER,
    "windows": dataclasses.replace(
        DECODER,
        num_layers=4,
        layer_pattern=("local", "global"),
        window=128,
        attention_soft_cap=50.0,
        logit_soft_cap=30.0,
    ),
    "gates": dataclasses.replace(DECODER, streaming=StreamingHeads()),
    "experts": EXPERTS,
    "gpt-oss": dataclasses.replace(
        DECODER,
        num_layers=4,
        head_dim=64,
        bias="attention",
        activation="clamped_swiglu",
        attention_sinks="head",
        layer_pattern=("local", "global"),
        window=128,
        moe=Moe(num_experts=4, top_k=2, expert_dim=256, bias="all"),
    ),
    "latents": dataclasses.replace(
        DECODER,
        num_layers=4,
        num_kv_heads=None,
        latent=LatentAttention(kv_rank=128, query_rank=128, rotary_dim=64, value_dim=64),
        moe=Moe(
            num_experts=4,
            top_k=2,
            expert_dim=256,
            first_dense=1,
            shared_experts=1,
            score="sigmoid",
            correction="expert",
            groups=2,
            scale=2.5,
        ),
    ),
    "recurrent": dataclasses.replace(
        DECODER,
        num_layers=5,
        num_kv_heads=None,
        layer_pattern=("recurrent", "global"),
        mixer=GatedDelta(key_heads=4, value_heads=8, key_dim=64, value_dim=64),
        latent=LatentAttention(kv_rank=128, query_rank=128, rotary_dim=64, value_dim=64),
        moe=Moe(num_experts=4, top_k=2, expert_dim=256, first_dense=1, shared_experts=1),
    ),
    "entries": DeepseekV4Config(
        vocab_size=SIZES["vocab_size"],
        embed_dim=SIZES["embed_dim"],
        num_layers=3,
        num_heads=8,
        head_dim=64,
        mlp_dim=256,
        first_kinds=("local",),
        layer_pattern=("compressed_sparse", "compressed"),
        window=32,
        rate=16,
        indexer=Indexer(heads=4, head_dim=64, top=16, pairs="adjacent"),
        query_rank=128,
        out_groups=4,
        out_rank=64,
        rope=Rope(local_theta=1000.0, fraction=0.5, pairs="adjacent"),
        moe=Moe(
            num_experts=4,
            top_k=2,
            hash_layers=1,
            shared_experts=1,
            score="sqrt_softplus",
            correction="expert",
            scale=1.5,
        ),
    ),
    "gemma3n": GEMMA3N,
    "encoder-decoder": EncoderDecoderConfig(**SIZES),
    "encoder": EncoderConfig(**SIZES),
    "decoder LoRA": dataclasses.replace(DECODER, lora=dataclasses.replace(LORA, trainable_tokens=(3, 200))),
    "decoder QLoRA": dataclasses.replace(DECODER, **QLORA),
    "experts LoRA": dataclasses.replace(EXPERTS, lora=LORA),
    "gemma3n QLoRA": dataclasses.replace(GEMMA3N, **QLORA),
}


def compiles_on(name: str, sizes: dict[str, int]) -> bool:
    """Whether a model runs on such a mesh: Gemma 3n and gates have no stages, recurrent layers and gates no context axis."""
    in_parts = "context" in sizes and (MODELS[name].stateful or MODELS[name].streaming is not None)
    return not in_parts and ("stage" not in sizes or MODELS[name].runs_in_stages)


# Meshes of a slice: all for what is trained, the first for what shares its layers.
SLICES = {
    "v5e-4": [dict(fsdp=2, tensor=2), dict(fsdp=4)],
    "v5e-8": [dict(fsdp=2, expert=2, tensor=2), dict(fsdp=4, context=2)],
    "v5e-16": [dict(data=2, fsdp=2, tensor=4), dict(fsdp=4, stage=2, tensor=2)],
    "v6e-4": [dict(expert=2, context=2)],
    "v6e-8": [dict(fsdp=2, stage=2, tensor=2), dict(data=2, fsdp=4)],
}
LOSSES = {
    "Dpo": Dpo(),
    "Grpo": Grpo(rewards=(exact_answer,), kl=0.1, updates=2, sampling=Sampling(max_new_tokens=64)),
    "DuoAttention": DuoAttention(passkeys=1, passkey_words=1),
    "Distillation": Distillation(teacher=Teacher(path="runs/large", model=DECODER), top_k=16, hard_weight=0.5),
}


PACKAGE = pathlib.Path(setup.__file__).resolve().parent.parent


def shown(sizes: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


@contextlib.contextmanager
def running(*sites: str) -> Iterator[None]:
    """Asserts that functions of capibara, each given as "file qualified.name", are called within the context."""
    seen, codes = set(), set()

    def look(frame, *_):
        """At the beginning of each Python function; a profile would be called at the ends, and for those in C, too."""
        code = frame.f_code
        if code not in codes:
            codes.add(code)
            if code.co_filename.startswith(str(PACKAGE)):
                path = pathlib.Path(code.co_filename).relative_to(PACKAGE).as_posix()
                seen.add(f"{path} {code.co_qualname.replace('.<locals>', '')}")

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
    assert not set(sites) - seen, f"{sorted(set(sites) - seen)} did not run: it is no part of this program"


def mesh_of(sizes: dict[str, int], slice_name: str, rows: int = ROWS) -> Mesh:
    return sharding.make_mesh(Plan(batch_size=rows, **{"fsdp": 1} | sizes), topology.slice_devices(slice_name))


def replicated(mesh: Mesh, *shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


@dataclasses.dataclass(frozen=True)
class Case:
    """A run on a slice that is not there.

    Attributes:
      model_name, slice_name: in MODELS and SLICES.
      sizes: of the mesh's axes.
      options: of the Trainer, besides.
    """

    model_name: str
    slice_name: str
    sizes: dict[str, int]
    options: dict = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def mesh(self) -> Mesh:
        return mesh_of(self.sizes, self.slice_name)

    @functools.cached_property
    def trainer(self) -> Trainer:
        config, loss = MODELS[self.model_name], self.options.get("loss")
        source = {Dpo: PreferenceJsonlSource, Grpo: PromptJsonlSource}.get(type(loss), StdlibSource)
        data = {} if loss is None else {"packing": Packing.NONE if isinstance(loss, Grpo) else Packing.BEST_FIT}
        data |= {"packing": Packing.NONE} if "privacy" in self.options else {}
        if isinstance(config, EncoderDecoderConfig):
            data["encoder_length"] = LENGTH
        files = (
            {} if source is StdlibSource else {"files": ("unread.jsonl",), "template": ChatTemplate(tokenizer="unread")}
        )
        dataset = Dataset(
            source=source(**files), vocabulary=ByteVocabulary(), length=LENGTH, kind=config.data_kind, **data
        )
        plan = Plan(batch_size=ROWS, remat="minimal", **{"fsdp": 1} | self.sizes)
        options = {"optimizer": Optimizer(), "ema_decay": 0.999} | self.options
        return Trainer(model_dir="unused", steps=100, model=config, plan=plan, dataset=dataset, **options)

    @property
    def plan(self) -> Plan:
        return self.trainer.plan

    @functools.cached_property
    def model(self) -> api.Model:
        return api.build(self.trainer.model)

    @functools.cached_property
    def state(self) -> setup.StateSpec:
        return setup.describe_state(self.trainer, self.model, self.mesh)

    def params_of(self, model: api.Model) -> api.Params:
        """The abstract parameters of a model, as the run lays them out."""
        shardings = sharding.shardings(self.mesh, self.plan.rules, model.axes, model.abstract_params)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), model.abstract_params, shardings
        )

    def batch(self, spec=None) -> dict[str, jax.ShapeDtypeStruct]:
        """An abstract batch; `spec`: shapes and dtypes, None: those of the step's."""
        placed = sharding.batch_sharding(self.mesh, self.plan.rules)
        spec = self.trainer.batch_spec if spec is None else spec
        return {name: jax.ShapeDtypeStruct(*of_array, sharding=placed) for name, of_array in spec.items()}
