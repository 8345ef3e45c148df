"""Models, workloads and choices for the planner's tests."""

import dataclasses

from capibara.models import api
from capibara.models.parts.moe import Moe
from capibara.optim import Optimizer
from capibara.planner.hardware import slices
from capibara.planner.model import workload
from capibara.planner.model.choice import Choice
from capibara.sharding import MESH_AXES, Remat, RematPolicy

DENSE = api.DecoderConfig(
    vocab_size=1024, embed_dim=512, num_layers=4, num_heads=8, num_kv_heads=4, mlp_dim=1024, head="separate"
)
EXPERTS = dataclasses.replace(DENSE, moe=Moe(num_experts=8, top_k=2))
PAIRS = api.EncoderDecoderConfig(
    vocab_size=1024, embed_dim=512, num_layers=2, num_encoder_layers=4, num_heads=8, mlp_dim=1024
)
V5E = slices.parse("v5e-64")


def work_of(config=DENSE, *, optimizer=Optimizer(), length=2048, **options):
    encoder = 1024 if isinstance(config, api.EncoderDecoderConfig) else None
    return workload.describe(api.build(config), optimizer, length=length, encoder_length=encoder, **options)


def choice_of(rows=1, remat="none", accumulation=1, names=RematPolicy.names, **mesh):
    sizes = tuple(mesh.get(axis, 1) for axis in MESH_AXES)
    return Choice(sizes=sizes, rows=rows, accumulation=accumulation, remat=RematPolicy(Remat(remat), names))
