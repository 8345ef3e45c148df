"""The plans in gin/slices/: lists their records, or has the planner write those that are missing.

    python benchmarks/presets.py [--write] [--slices=v5e-64,v6e-64] [--models=capibara_1b]
    python benchmarks/presets.py --write_finetuning [--chips=v5e,v6e]

Each is what `capibara plan --verify` found for a model on a slice, with the compiler's record beside it; moments are
narrower than float32 where nothing else fits. Writing needs
libtpu and takes one to some minutes for a plan on two cores; remove a file to have it written anew.

Those for fine-tuning are of the smallest slice that the memory model says they fit, for rows of 4096 with a tenth of the
HBM to spare: MODEL_lora beside a base in bfloat16, MODEL_qlora beside one in
NF4. They are predicted, not compiled: how near predictions of such steps come is in planner.py's points.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORDED = ("slice", "mesh", "batch_size", "rows", "accumulation", "remat", "remat_names", "state_dtype")
FOLDER = ROOT / "gin" / "slices"
SLICES = ("v5e-64", "v6e-64", "v6e-256", "v5e-256")
MODELS = ("capibara_125m", "capibara_1b", "capibara_8b", "capibara_20b", "capibara_120b", "mixtral_8x7b")
LENGTH = 4096
STATE_DTYPES = ("float32", "bfloat16", "int8")  # the first with which a plan fits

FINETUNED = ("capibara_8b", "capibara_20b", "capibara_120b")
_ADAPTERS = ("DecoderConfig.lora = @Lora()", "Lora.rank = 16", "Lora.alpha = 32.0", 'Lora.targets = ("all-linear",)')
BASES = {
    "lora": (*_ADAPTERS, 'Lora.base_dtype = "bfloat16"'),
    "qlora": (*_ADAPTERS, 'Lora.base_dtype = "nf4"', "Lora.double_quantization = True"),
}
HEADROOM = 0.1


def write(model: str, slice_: str) -> None:
    """Has the planner choose and prove a plan; a model that is too large for the slice has none."""
    target = FOLDER / slice_ / f"{model}.gin"
    if target.exists() and target.with_suffix(".json").exists():
        return
    raw = target.with_suffix(".partial")
    raw.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "capibara.plan", f"--gin_file=models/{model}.gin", f"--slice={slice_}"]
    command += [f"--length={LENGTH}", "--verify", "--include", f"--output={target}", f"--json={raw}", "--top=1"]
    for dtype in STATE_DTYPES:
        child = run([*command, f"--state_dtypes={dtype}"])
        if not child.returncode:
            break
        print(f"{slice_:8} {model:16} {dtype} moments: {child.stderr.strip().splitlines()[-1]}", flush=True)
    else:
        return
    plan = json.loads(raw.read_text(encoding="utf-8"))["plans"][0]
    raw.unlink()
    compiled = plan["verdict"]["compiled"]
    record = {name: plan[name] for name in RECORDED}
    record |= {
        "model": model,
        "length": LENGTH,
        "date": plan["verdict"]["date"],
        "versions": plan["verdict"]["versions"],
    }
    predicted = plan["predicted"]
    record["predicted"] = {"peak_bytes": predicted["uncorrected_peak_bytes"]}  # not what this very compile has taught
    record["predicted"] |= {name: predicted[name] for name in ("step_s", "tokens_per_s_chip", "mfu")}
    names = (
        "fits",
        "peak_bytes",
        "limit_bytes",
        "argument_bytes",
        "temporary_bytes",
        "host_temporary_bytes",
        "compile_s",
    )
    record["compiled"] = {name: compiled[name] for name in names}
    record["compiled"]["matmul_flops"] = compiled["costs"]["matmul_flops"]
    record["compiled"]["collective_bytes"] = compiled["costs"]["collective_bytes"]
    target.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs the planner on this checkout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )


def write_finetuning(model: str, base: str, chip: str) -> None:
    """Has the planner choose the smallest slice of these chips and a plan on it."""
    name = f"{model}_{base}"
    if any(FOLDER.glob(f"{chip}-*/{name}.gin")):
        return
    FOLDER.mkdir(exist_ok=True)
    raw, plan_file = FOLDER / f"{name}.partial", FOLDER / f"{name}.gin.partial"
    command = [sys.executable, "-m", "capibara.plan", f"--gin_file=models/{model}.gin", f"--length={LENGTH}"]
    command += [f"--gin.{statement.replace(' = ', '=')}" for statement in BASES[base]]
    # A row of the largest is too long for one chip of these: its positions may be sharded.
    whole = ("context", "stage") if model == "capibara_120b" else ("tensor", "context", "stage")
    command += [f"--axis={axis}=1" for axis in whole]
    command += ["--goal=smallest_slice", f"--chips={chip}", f"--headroom={HEADROOM}", "--top=1"]
    child = run([*command, "--include", f"--output={plan_file}", f"--json={raw}"])
    if child.returncode:
        print(f"{chip:8} {name}: {child.stderr.strip().splitlines()[-1]}", flush=True)
        return
    plan = json.loads(raw.read_text(encoding="utf-8"))["plans"][0]
    record = {name: plan[name] for name in RECORDED} | {"model": model, "base": base, "length": LENGTH}
    names = ("peak_bytes", "step_s", "tokens_per_s_chip", "mfu")
    record["predicted"] = {name: plan["predicted"][name] for name in names}
    target = FOLDER / plan["slice"] / f"{name}.gin"
    target.parent.mkdir(exist_ok=True)
    plan_file.rename(target)
    raw.unlink()
    target.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def show() -> None:
    """Prints the records."""
    print(
        f"{'slice':8} {'model':20}{'batch':>7}  {'mesh':36}{'remat':9}{'peak GiB':>9}{'of HBM':>8}{'predicted':>10}{'MFU':>7}"
    )
    for path in sorted(FOLDER.glob("*/*.json")):
        r = json.loads(path.read_text(encoding="utf-8"))
        mesh = " x ".join(f"{axis}={size}" for axis, size in r["mesh"].items() if size > 1)
        compiled = f"{'':17}"
        if "compiled" in r:
            peak, limit = r["compiled"]["peak_bytes"], r["compiled"]["limit_bytes"]
            compiled = f"{peak / 2**30:9.2f}{peak / limit:8.0%}"
        print(
            f"{r['slice']:8} {path.stem:20}{r['batch_size']:7}  {mesh:36}{r['remat']:9}{compiled}"
            f"{r['predicted']['peak_bytes'] / 2**30:10.2f}{r['predicted']['mfu']:7.0%}"
        )
    print("peak: compiled; predicted: GiB, before anything was compiled; MFU: predicted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the plans that are missing")
    parser.add_argument("--slices", default=",".join(SLICES), help="which slices")
    parser.add_argument("--models", default=",".join(MODELS), help="which models in gin/models/")
    parser.add_argument("--write_finetuning", action="store_true", help="write those for fine-tuning that are missing")
    parser.add_argument("--chips", default="v5e,v6e", help="for which chips")
    options = parser.parse_args()
    for chip in options.chips.split(",") if options.write_finetuning else ():
        for model in FINETUNED:
            for base in BASES:
                write_finetuning(model, base, chip)
    for slice_ in options.slices.split(",") if options.write else ():
        for model in options.models.split(","):
            write(model, slice_)
    show()


if __name__ == "__main__":
    main()
