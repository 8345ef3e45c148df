#!/bin/sh
# jax 0.10.2 and 0.12.0.1: `import jax` reads the metadata of every package that is installed, to find a plugin for ROCm.
#
# jax/_src/numpy/array_constructors.py goes through importlib.metadata.distributions() and asks each one's Name, for which the whole
# METADATA file is read and parsed, README included; names beginning with jax-rocm are few.
#   expected: what an import takes does not depend on other packages in the environment; entry points name plugins
#   seen:     as many METADATA files are read as there are distributions: 316 of them take 0.06 s of a processor, a tenth of the import
#
# Exits with 1 if JAX does otherwise. PEER_PYTHON: a python with jax; else jax 0.10.2 is installed in a new folder.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
    PEER_PYTHON="$folder/venv/bin/python"
fi
JAX_PLATFORMS=cpu "$PEER_PYTHON" - <<'PYTHON'
import importlib.metadata
import sys

files = []
read_text = importlib.metadata.PathDistribution.read_text


def counted(self, name):
    files.append(name)
    return read_text(self, name)


installed = sum(1 for _ in importlib.metadata.distributions())
importlib.metadata.PathDistribution.read_text = counted
import jax

print("jax", jax.__version__, "distributions", installed, "METADATA files read", files.count("METADATA"))
sys.exit(0 if files.count("METADATA") >= installed else 1)
PYTHON
