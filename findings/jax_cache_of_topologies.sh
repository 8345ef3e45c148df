#!/bin/sh
# jax 0.12.0.1, libtpu 0.0.50.1: JAX's compilation cache stores programs compiled for a TPU topology, and reads none of them.
#
# One program, compiled twice for v5e without a TPU, with a cache folder.
#   expected: the second compile is read from the folder; or nothing is stored, as for back ends that cannot be read
#   seen:     the first one is stored; the second finds it, cannot load it ("PjRtCompiler must be constructed with a Client to
#             call DeserializeLoadedExecutable"), warns, and compiles again. A compile ahead of time gains nothing by a cache,
#             and fills it. Of the key's parts that name the back end only runtime_type says that there is no TPU
#
# Exits with 1 if JAX does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    python3.12 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet jax==0.12.0.1 jaxlib==0.12.0.1 libtpu==0.0.50.1
    PEER_PYTHON="$folder/venv/bin/python"
fi
export TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_COMPILATION_CACHE_DIR="$folder/cache"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
cat >"$folder/compile.py" <<'PYTHON'
import collections
import importlib.metadata
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
rows = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), "x"), jax.sharding.PartitionSpec("x"))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=rows)
    jax.jit(lambda x: jnp.sum(x @ x.T)).lower(x).compile()
refused = any("DeserializeLoadedExecutable" in str(warning.message) for warning in caught)
stored = len([name for name in os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"]) if name.endswith("-cache")])
print(f"jax {jax.__version__} libtpu {importlib.metadata.version('libtpu')} {devices[0].client.runtime_type}:", end=" ")
print(f"hits {events['cache_hits']}, stored {stored}, refused {refused}")
PYTHON
first=$("$PEER_PYTHON" "$folder/compile.py" 2>/dev/null)
second=$("$PEER_PYTHON" "$folder/compile.py" 2>/dev/null)
echo "$first"
echo "$second"
case "$first" in *"hits 0, stored 1, refused False") ;; *) exit 1 ;; esac
case "$second" in *"hits 0, stored 1, refused True") ;; *) exit 1 ;; esac
