#!/bin/sh
# libtpu 0.0.42.1 with jax 0.10.2: peak_memory_in_bytes is the peak of the fullest memory, be it the host's.
#
# A train step whose layers' inputs are in pinned host memory (jax.checkpoint's save_and_offload_only_these_names), compiled
# for v5e without a TPU.
#   expected: memory_analysis().peak_memory_in_bytes is the step's HBM, or HBM and host memory together
#   seen:     it is arguments, results and the larger of both: with 3 GiB in the host's memory and 0.75 GiB of temporaries in
#             HBM these are not in it, and subtracting the host's bytes leaves arguments and results alone. XLA's usage
#             report, in the folder of the option xla_dump_to, has each memory by itself; there lies the compiler's limit
#
# Exits with 1 if libtpu does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.42.1
    PEER_PYTHON="$folder/venv/bin/python"
fi
TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu ALLOW_MULTIPLE_LIBTPU_LOAD=1 "$PEER_PYTHON" - "$folder/dump" <<'PYTHON'
import importlib.metadata
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies

print("jax", jax.__version__, "libtpu", importlib.metadata.version("libtpu"))
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = jax.sharding.Mesh(np.array(devices), "x")
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
policy = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["x"], offload_src="device", offload_dst="pinned_host"
)


def layer(x, w):
    x = checkpoint_name(x, "x")
    return x + jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), None


def loss(w, x):
    y, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy, prevent_cse=False), x, w)
    return jnp.sum(y.astype(jnp.float32) ** 2)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=everywhere)


lowered = jax.jit(jax.grad(loss), out_shardings=everywhere).lower(shape(24, 2, 1024, 1024), shape(65536, 1024))
memory = lowered.compile(compiler_options={"xla_dump_to": sys.argv[1]}).memory_analysis()
report = next(pathlib.Path(sys.argv[1]).glob("*memory-usage-report.txt")).read_text()
hbm = int(re.search(r"\(color=0\)\nTotal bytes: (\d+)", report)[1])
host, peak, arguments = (
    memory.host_temp_size_in_bytes, memory.peak_memory_in_bytes, memory.argument_size_in_bytes
)  # fmt: skip
mib = lambda size: f"{size / 2**20:.0f} MiB"
print(f"peak_memory_in_bytes {mib(peak)}, arguments {mib(arguments)}, in the host's memory {mib(host)}; HBM {mib(hbm)}")
sys.exit(0 if host > 0 and peak - host < hbm / 2 and peak < host + hbm / 2 else 1)
PYTHON
