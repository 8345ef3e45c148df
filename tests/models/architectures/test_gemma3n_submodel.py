"""The smaller Gemma 3n inside a larger one: what of its tensors is left, and what cannot be left out."""

import dataclasses
import pathlib
import sys

import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from test_gemma3n import CONFIG, batch_of, model_and_params  # noqa: E402

from capibara.core.types import UserError  # noqa: E402
from capibara.interop import open_model  # noqa: E402
from capibara.models import api  # noqa: E402
from capibara.models.api import Submodel  # noqa: E402

WIDTHS = (48, 16, 48, 32, 32, 48)  # of the layers that stay


def tensors(params, config):
    """By their names in a Hugging Face checkpoint."""
    return dict(open_model.hf_tensors(params, api.build(config), "gemma3n_text"))


def reference(whole, skipped, widths, layers=8):
    """As google-gemini/gemma-cookbook's MatFormer Lab makes the tensors of a submodel, by name."""
    kept, found = [layer for layer in range(layers) if layer not in skipped], {}
    for name, value in whole.items():
        prefix, _, rest = name.partition("model.layers.")
        if not prefix and rest:
            layer, _, part = rest.partition(".")
            if int(layer) in skipped:
                continue
            at = kept.index(int(layer))
            if ".mlp." in name:
                value = value[:, : widths[at]] if "down_proj" in name else value[: widths[at]]
            name = f"model.layers.{at}.{part}"
        elif "per_layer_model_projection" in name:
            value = value.reshape(layers, -1, value.shape[1])[kept].reshape(-1, value.shape[1])
        elif "embed_tokens_per_layer" in name:
            value = value.reshape(value.shape[0], layers, -1)[:, kept].reshape(value.shape[0], -1)
        found[name] = value
    return found


def test_what_is_left_is_the_published_submodel():
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), api.build(CONFIG).abstract_params)
    part = Submodel(skip_layers=(0, 5), mlp_dims=WIDTHS)
    config = part.config(CONFIG)
    assert (config.num_layers, config.kv_shared_layers, config.mlp_dim, config.mlp_dims) == (6, 3, 48, WIDTHS)
    assert config.activation_sparsity == (0.8,)
    assert config.kinds == tuple(CONFIG.kinds[layer] for layer in (1, 2, 3, 4, 6, 7))
    got, want = tensors(part.params(CONFIG, params), config), reference(tensors(params, CONFIG), (0, 5), WIDTHS)
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.heavy
def test_narrow_layers_without_what_filled_them_answer_as_before():
    model, params = model_and_params(dataclasses.replace(CONFIG, mlp_dims=(48, 16, 48, 32, 32, 48, 16, 48)))
    same = Submodel(mlp_dims=(48, 16, 48, 32, 32, 48, 16, 48))
    config = same.config(CONFIG)
    assert config == model.config
    logits = jax.jit(api.build(config).logits)(same.params(CONFIG, params), batch_of())
    np.testing.assert_array_equal(logits, jax.jit(model.logits)(params, batch_of()))


def test_e2b_is_in_e4b():
    e4b = dataclasses.replace(CONFIG, num_layers=35, kv_shared_layers=15, layer_pattern=("local",) * 4 + ("global",))
    e2b = Submodel(skip_layers=tuple(range(20, 25)), mlp_dims=(24,)).config(e4b)
    assert (e2b.num_layers, e2b.kv_shared_layers, e2b.layer_pattern) == (30, 10, e4b.layer_pattern)
    assert (e2b.mlp_dim, e2b.mlp_dims) == (24, None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(skip_layers=(8,)), "skip_layers has 8, must be from 0 to 7"),
        (dict(skip_layers=tuple(range(8))), "skip_layers leaves none of 8 layers"),
        (dict(skip_layers=(3,)), "skip_layers has 3, whose keys and values the last global layers read"),
        (dict(mlp_dims=(16, 16)), "mlp_dims has 2 widths, must be one, or one for each of 8"),
        (dict(mlp_dims=(64,)), "mlp_dims has 64 for layer 0, must be from 1 to its 48"),
        (dict(mlp_dims=(0,)), "mlp_dims has 0 for layer 0"),
    ],
)
def test_what_cannot_be_left_out_is_refused(fields, said):
    with pytest.raises(UserError) as caught:
        Submodel(**fields).config(CONFIG)
    assert said in str(caught.value)
