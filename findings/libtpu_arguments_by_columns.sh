#!/bin/sh
# jax 0.12.0.1, libtpu 0.0.50.1: a program's argument whose rows are no multiple of 128 is stored by columns, and a look-up of rows,
# or a Pallas kernel, copies all of it first.
#
# Rows of a table of 50,272 x 2,880 (gpt-oss 20B's embedding on four chips), and a kernel that is given 4 matrices of 2,880 x 720,
# compiled for v5e without a TPU.
#   expected: 32 rows are read where they lie, as of 50,272 x 2,944, the same with zeros; the kernel reads its operand
#   seen:     libtpu makes those dimensions the innermost that need the least padding, and gather and kernel take rows alone: a copy
#             of the table in each run, 296 MB for rows of 0.2 MB, and one of the matrices. Nothing warns; with tables or matrices
#             that are stored for it, there is no copy
#
# Exits with 1 if libtpu does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    python3.12 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet jax==0.12.0.1 jaxlib==0.12.0.1 libtpu==0.0.50.1
    PEER_PYTHON="$folder/venv/bin/python"
fi
TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu ALLOW_MULTIPLE_LIBTPU_LOAD=1 "$PEER_PYTHON" - <<'PYTHON'
import importlib.metadata
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental import topologies

print("jax", jax.__version__, "libtpu", importlib.metadata.version("libtpu"))
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = jax.sharding.Mesh(np.array(devices), "x")
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)


def copied_bytes(function, *arguments):
    """Bytes of the program's copies of whole arguments."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    sizes = {",".join(map(str, x.shape)): x.size * x.dtype.itemsize for x in arguments}
    return sum(sizes.get(dims, 0) for dims in re.findall(r" = bf16\[([\d,]+)\]\S* copy\(", text))


def doubled(x):
    call = pl.pallas_call(
        lambda x_ref, y_ref: y_ref.__setitem__(..., x_ref[...] * 2),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(len(x),),
        in_specs=[pl.BlockSpec((1, *x.shape[1:]), lambda g: (g, 0, 0))],
        out_specs=pl.BlockSpec((1, *x.shape[1:]), lambda g: (g, 0, 0)),
    )
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


rows = array(32, dtype=jnp.int32)
looked_up, padded = (copied_bytes(lambda table, rows: table[rows], array(50272, size), rows) for size in (2880, 2944))
by_columns, by_rows = (
    copied_bytes(lambda x: jnp.sum(doubled(x).astype(jnp.float32)), array(4, *shape)) for shape in ((2880, 720), (720, 2880))
)
print(f"look-up of rows of 2,880: {looked_up / 1e6:.0f} MB copied, of 2,944: {padded / 1e6:.0f}")
print(f"kernel over matrices of 2,880 x 720: {by_columns / 1e6:.1f} MB copied, of 720 x 2,880: {by_rows / 1e6:.1f}")
sys.exit(not (looked_up > 2e8 and padded == 0 and by_columns > 1e7 and by_rows == 0))
PYTHON
