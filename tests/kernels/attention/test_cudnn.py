"""The call that cuDNN gets: with XLA behind it, it must give the plain formula's numbers. No GPU is needed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.attention import cudnn
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models.layers.attention import dot_product_attention

CAUSAL = AttentionSpec(causal=True, window=None, soft_cap=None, scale=0.2)


@pytest.mark.standard_promotion  # jax.nn's own formula mixes dtypes
@pytest.mark.parametrize(
    "kind", [CAUSAL, dataclasses.replace(CAUSAL, window=5), dataclasses.replace(CAUSAL, causal=False)]
)
def test_the_arguments_mean_the_same_mask(kind):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 16, heads, 8)) for key, heads in zip(keys, (4, 2, 2)))
    segments = jnp.asarray([[1] * 6 + [2] * 8 + [0] * 2, [1] * 16], jnp.int32)
    options = {"kind": kind, "q_segments_BT": segments, "kv_segments_BS": segments}
    got = cudnn.cudnn_attention(q, k, v, implementation="xla", **options)
    np.testing.assert_allclose(got, dot_product_attention(q, k, v, **options), rtol=1e-5, atol=1e-6)


def test_what_cudnn_cannot_do_is_said():
    q, k = jnp.zeros((2, 16, 4, 64), jnp.bfloat16), jnp.zeros((2, 16, 2, 64), jnp.bfloat16)
    assert cudnn.supported(q, k, kind=CAUSAL)
    assert cudnn.supported(q, k, kind=dataclasses.replace(CAUSAL, window=4))
    assert not cudnn.supported(q, k, kind=dataclasses.replace(CAUSAL, soft_cap=30.0))
    assert not cudnn.supported(q, k, kind=dataclasses.replace(CAUSAL, causal=False, window=4))
    assert not cudnn.supported(q, k, kind=CAUSAL, bias_NTS=jnp.zeros((4, 16, 16)))
    assert not cudnn.supported(q.astype(jnp.float32), k.astype(jnp.float32), kind=CAUSAL)
    assert not cudnn.supported(q[..., :60], k[..., :60], kind=CAUSAL)
    assert not cudnn.supported(q[:, :15], k[:, :15], kind=CAUSAL)
