"""The call that cuDNN receives: with XLA as its implementation it must agree with the reference. Needs no GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.attention import cudnn, reference
from capibara.kernels.attention.signature import AttentionInputs
from capibara.kernels.attention.spec import AttentionSpec

CAUSAL = AttentionSpec(causal=True, window=None, soft_cap=None, scale=0.2)


@pytest.mark.standard_promotion  # jax.nn's own formula mixes dtypes
@pytest.mark.parametrize(
    "spec", [CAUSAL, dataclasses.replace(CAUSAL, window=5), dataclasses.replace(CAUSAL, causal=False)]
)
def test_the_arguments_mean_the_same_mask(spec):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 16, heads, 8)) for key, heads in zip(keys, (4, 2, 2)))
    segments = jnp.asarray([[1] * 6 + [2] * 8 + [0] * 2, [1] * 16], jnp.int32)
    inputs = AttentionInputs(q, k, v, segments, segments)
    got = cudnn.attend(inputs, spec, implementation="xla")
    np.testing.assert_allclose(got, reference.attend(inputs, spec), rtol=1e-5, atol=1e-6)


def test_what_cudnn_cannot_do_is_said():
    q, k = jnp.zeros((2, 16, 4, 64), jnp.bfloat16), jnp.zeros((2, 16, 2, 64), jnp.bfloat16)
    segments = jnp.ones((2, 16), jnp.int32)

    def fits(q=q, k=k, bias_NTS=None, **changes):
        inputs = AttentionInputs(q, k, k, segments, segments, bias_NTS=bias_NTS)
        return cudnn.unsupported_reason(inputs, dataclasses.replace(CAUSAL, **changes)) is None

    assert fits()
    assert fits(window=4)
    assert not fits(soft_cap=30.0)
    assert not fits(causal=False, window=4)
    assert not fits(bias_NTS=jnp.zeros((4, 16, 16)))
    assert not fits(q.astype(jnp.float32), k.astype(jnp.float32))
    assert not fits(q[..., :60], k[..., :60])
    assert not fits(q[:, :15], k[:, :15])
