#!/bin/sh
# jax 0.12.0.1 on a CPU: one row times a weight of shape [outputs, inputs], `x @ w.T`, takes several times what `(w @ x.T).T` takes.
#
# Weights of PyTorch and of most checkpoints have this shape, and a decode step of one text multiplies by each of them so. Both forms are one
# product of a matrix and a vector that reads the weight once. With 2 rows and more both are compiled to the same kernel.
#   expected: the two forms take the same time, as with jax 0.10.2 (76 and 84 us for 1536 x 576, two cores of an AMD EPYC)
#   seen:     464 and 73 us
#
# Exits with 1 if JAX does otherwise. PEER_PYTHON: a python with jax; else jax 0.12.0.1 is installed in a new folder, by PYTHON (3.12).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    "${PYTHON:-python3.12}" -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet jax==0.12.0.1 jaxlib==0.12.0.1
    PEER_PYTHON="$folder/venv/bin/python"
fi
JAX_PLATFORMS=cpu "$PEER_PYTHON" - <<'PYTHON'
import statistics
import sys
import time

import jax
import jax.numpy as jnp

weight, row = jnp.ones((1536, 576)), jnp.ones((1, 576))
forms = {"x @ w.T": jax.jit(lambda x, w: x @ w.T), "(w @ x.T).T": jax.jit(lambda x, w: (w @ x.T).T)}
seconds = {name: [] for name in forms}
for _ in range(300):  # by turns, so that other work of the machine delays both
    for name, form in forms.items():
        begin_s = time.perf_counter()
        form(row, weight).block_until_ready()
        seconds[name].append(time.perf_counter() - begin_s)
times = [statistics.median(each[20:]) for each in seconds.values()]
print("jax", jax.__version__, *(f"{name}: {1e6 * time_s:.0f} us" for name, time_s in zip(seconds, times)), sep="  ")
sys.exit(0 if times[0] > 2 * times[1] else 1)
PYTHON
