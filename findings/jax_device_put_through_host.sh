#!/usr/bin/env bash
# In jax 0.10.2 `jax.device_put` of an array to other devices reads all of it to the host, unless each shard is on a device already.
#
# device_put takes a sharding on any devices. Where the source has a buffer with exactly the indices of each shard of the target,
# buffers are copied from device to device. Where it has not, such as from four shards to one device, or to two shards on others, the
# array is assembled on the host and sent from there; no warning says so, and jax.transfer_guard_device_to_host("disallow")
# does not forbid it on a CPU. A jitted identity with the shards of the target on the source's devices, before device_put, avoids it.
#
# Expected: weights that go from the devices that train to those that generate stay on devices, or a guard tells.
# Seen: the whole array is read (jax.Array._value) for 4 shards -> 1 device and 4 shards -> 2 shards elsewhere; not for equal
# shards, nor after the identity.
#
# Ends with 0 if that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 2> "$folder/pip.log" || {
  cat "$folder/pip.log" >&2; exit 2; }
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 "$folder/env/bin/python" - << 'PYTHON'
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

devices, reads = np.array(jax.devices()), []
rows = PartitionSpec("x")
four, elsewhere = (NamedSharding(Mesh(devices[part], ("x",)), rows) for part in (slice(0, 4), slice(4, 8)))
two = NamedSharding(Mesh(devices[4:6], ("x",)), rows)
one = SingleDeviceSharding(devices[4])
two_of_source = NamedSharding(Mesh(devices[:4].reshape(2, 2), ("copies", "x")), rows)
source = jax.block_until_ready(jax.device_put(np.arange(64.0).reshape(8, 8), four))
array, value = type(source), type(source)._value


def read(x):
    reads.append(x.shape)
    return value.__get__(x)


def is_read(x, target):
    reads.clear()
    with jax.transfer_guard_device_to_host("disallow"):
        jax.block_until_ready(jax.device_put(x, target))
    return bool(reads)


array._value = property(read)
prepared = jax.jit(lambda x: x, out_shardings=two_of_source)(source)
seen = {
    "4 shards -> 4 shards elsewhere": is_read(source, elsewhere),
    "4 shards -> 1 device": is_read(source, one),
    "4 shards -> 2 shards elsewhere": is_read(source, two),
    "the same after an identity with 2 shards": is_read(prepared, two),
}
print("jax", jax.__version__)
for name, through_host in seen.items():
    print(f"{name}: {'read to the host' if through_host else 'from device to device'}")
sys.exit(0 if [*seen.values()] == [False, True, True, False] else 1)
PYTHON
