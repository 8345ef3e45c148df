#!/usr/bin/env bash
# In flax 0.12.8 (jax 0.10.2) a draw from nnx.Rngs in a traced function takes longer the more draws came before it.
#
# `rngs.params()` returns fold_in(key, count) and adds one to the count. The new count is set as a Variable's value, and setting
# compares the shardings of the old and the new value. A tracer has none: JAX makes the AttributeError that says so, whose
# message names where the tracer comes from, and finds that by walking through the program so far. Flax drops the error.
#
# Expected: the n-th draw costs what the first one does, so that tracing the initialisation of a model with n parameters takes
# time in proportion to n.
# Seen: of 800 draws in one jax.eval_shape a draw takes several times what one of 100 takes (2.2 ms after 100, some 10 ms after 800
# on one processor), where fold_in with a counted Python integer stays the same. Tracing with nnx.Rngs is quadratic in the number
# of parameters; outside of a trace nothing is compared.
#
# Ends with 0 if that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check flax==0.12.8 jax==0.10.2 2> "$folder/pip.log" || {
  cat "$folder/pip.log" >&2; exit 2; }
JAX_PLATFORMS=cpu "$folder/env/bin/python" - << 'PYTHON'
import sys
import time

import flax
import jax
from flax import nnx


def of_rngs(draws):
    rngs = nnx.Rngs(0)
    return [rngs.params() for _ in range(draws)]


def of_fold_in(draws):
    key = jax.random.key(0)
    return [jax.random.fold_in(key, count) for count in range(draws)]


def ms_a_draw(function, draws):
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        jax.eval_shape(lambda: function(draws))  # a new function: it is traced each time
        best = min(best, time.process_time() - began)
    return 1e3 * best / draws


print("flax", flax.__version__, "jax", jax.__version__)
growth = {}
for function in (of_rngs, of_fold_in):
    ms_a_draw(function, 10)
    few, many = ms_a_draw(function, 100), ms_a_draw(function, 800)
    growth[function] = many / few
    print(f"{function.__name__}: {few:.2f} ms a draw of 100, {many:.2f} ms of 800, {many / few:.1f}x")
sys.exit(0 if growth[of_rngs] > 2.5 and growth[of_fold_in] < 2 else 1)
PYTHON
