"""Training that begins from a Hugging Face folder."""

import dataclasses

import jax
import numpy as np
import pytest

from capibara.interop import checkpoint, hf_config, hf_folder, weights
from capibara.models import api
from capibara.models.api import DecoderConfig, Lora
from capibara.types import UserError

CONFIG = DecoderConfig(vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=48, dtype="float32")


def test_a_folder_gives_the_weights_of_its_model_alone(tmp_path):
    model = api.build(CONFIG)
    params = jax.jit(model.init)(jax.random.key(0))
    values, folder = hf_config.to_hf(CONFIG), str(tmp_path / "model")
    shapes = checkpoint.hf_shapes(model, values["model_type"])
    tensors = checkpoint.hf_tensors(params, model, values["model_type"])
    hf_folder.save_hf(folder, values, shapes, tensors, {}, dtype="float32")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), params)
    read = weights.load(folder, dataclasses.replace(CONFIG, lora=Lora(rank=2), num_kv_heads=4), target)
    jax.tree.map(np.testing.assert_array_equal, read, params)
    with pytest.raises(UserError, match=r"DecoderConfig.norm_eps is 0.001, must be 1e-06 with the weights of"):
        weights.load(folder, dataclasses.replace(CONFIG, norm_eps=1e-3), target)
