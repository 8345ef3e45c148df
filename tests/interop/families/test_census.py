"""Every type that transformers' auto classes for text know: its small default model answers here as there, or is refused.

TORCH_PYTHON=PATH/bin/python .venv/bin/python -m pytest -n 0 tests/interop/families/test_census.py    (transformers 5, torch, safetensors)
CENSUS=FOLDER is a folder that the peer program has written, or is to write. Prints a table.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from capibara.core.types import UserError

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "models" / "golden")]

import encoder_families  # noqa: E402
import test_families  # noqa: E402

PYTHON = os.environ.get("TORCH_PYTHON")
MOST = 120  # types of which at least so many agree
ROUNDINGS = (
    16  # as in the sweep of keys: sizes of the classes themselves, with scores that no scale keeps small (GPT-Neo)
)


def batch_of(head, model):
    """The tokens that the peer program has for a head."""
    if head == "masked":
        return test_families.batch_of(encoder_families.batch(0)["tokens"])
    batch = test_families.batch_of(test_families.tokens())
    return batch | test_families.further(model)


def verdict(head, folder):
    """What becomes of a folder here: "agrees", "refused: ...", or what is wrong."""
    if (folder / "failed.txt").exists():
        return f"not made: {(folder / 'failed.txt').read_text()}"
    try:
        model, params, _ = test_families.loaded(folder)
    except UserError as error:
        return f"refused: {error}" if "\n" not in str(error) else f"several lines: {error!r}"
    except Exception as error:
        return f"crashes: {type(error).__name__}: {error}"
    want = np.load(folder / "logits.npz")
    got = np.asarray(jax.jit(model.logits)(params, batch_of(head, model)))[..., : want["exact"].shape[-1]]
    size, own = np.abs(want["exact"]).max(), np.abs(want["logits"] - want["exact"]).max()
    apart = np.abs(got - want["exact"]).max()
    fine = apart <= max(test_families.RELATIVE * size, ROUNDINGS * own)
    return "agrees" if fine else f"differs: by {apart / size:.1e}, transformers' float32 by {own / size:.1e}"


@pytest.mark.heavy
@pytest.mark.skipif(not PYTHON, reason="TORCH_PYTHON names no python with torch")
def test_each_type_answers_as_transformers_does_or_is_refused(tmp_path):
    folder = pathlib.Path(os.environ.get("CENSUS", tmp_path))
    subprocess.run([PYTHON, HERE / "census_peer.py", folder], check=True)
    results = {}
    for path in sorted(folder.glob("*/*")):
        name = f"{path.parent.name}/{path.name}"
        results[name] = verdict(path.parent.name, path)
        print(f"{name}: {results[name][:300]}", file=sys.stderr)
    kinds = [result.partition(":")[0] for result in results.values()]
    print(json.dumps({kind: kinds.count(kind) for kind in sorted(set(kinds))}), file=sys.stderr)
    assert kinds.count("agrees") > MOST
    assert not {
        name: result for name, result in results.items() if result.startswith(("differs", "crashes", "several"))
    }
