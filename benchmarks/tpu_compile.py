"""What the real TPU compiler says of our train step and of MaxText's: same slice, shapes and batch; no TPU needed.

    python benchmarks/tpu_compile.py [--rows=1b-12,7b-4] [--maxtext_python=PATH/bin/python] [--layers=4] [--json=OUT]
    python benchmarks/tpu_compile.py --loss [--rows=gemma2-2b-8]

Needs libtpu (in requirements.lock). Without --maxtext_python MaxText's memory is the recorded one (MaxText 0.2.5, jax
0.11.1, libtpu 0.0.46); with it (an environment of Python 3.12 with maxtext[tpu]==0.2.5 and jax==0.11.1) MaxText is
compiled here too, with our libtpu, and its HLO is read as ours is. A libtpu older than a JAX cannot read its kernels: run
this with what `make setup PYTHON=python3.12` gives (.venv-3.12/bin/python, libtpu 0.0.50). A row takes one to six minutes
on two cores for each side. --loss compiles the loss and its gradients alone, in each of our two forms, in seconds; which
of them a train step takes is the rule of kernels/cross_entropy/dispatch.py.

Everything printed is compiled, nothing is timed on a chip. Of one chip and step: memory as the compiler plans it; FLOPs
of matmuls with loops as often as they turn, attention kernels apart (both sides call the same ones, their FLOPs stand
for the unmasked square); bytes that instructions read and write in HBM, and bytes of collectives; "cycles" is the sum
of the compiler's estimated cycles over the clock, without kernels and collectives. "model / compiled" is 6 x parameters
x tokens and attention, causal half, over the compiled FLOPs with as much of the kernels: recomputation lowers it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))  # the checkout's package, installed or not
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Row:
    """One compilation.

    Attributes:
      model: DecoderConfig's fields, or the name of a file in gin/models.
      slice: the TPU slice; all chips are one fsdp axis.
      rows: rows a chip.
      remat, names: Plan.remat and remat_names.
      maxtext: MaxText's remat_policy; None: MaxText is not asked.
      recorded_gib: MaxText's recorded peak; inf: it ran out of memory (7b-6 with libtpu 0.0.52: 15.76 of 15.75 GiB).
      loss: "blocked", or "whole logits" for the plain formula in place of ours.
      family: MaxText's keys of a model that is no Llama.
      options: whether each side is compiled with the other's compiler options, too. MaxText comes with none.
      length: tokens of a row.
      bindings: more Gin statements for a model that is read from a file.
    """

    model: dict[str, Any] | str
    slice: str
    rows: int
    remat: str = "full"
    names: tuple[str, ...] = ()
    maxtext: str | None = "full"
    recorded_gib: float | None = None
    loss: str = "blocked"
    family: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: bool = False
    length: int = 2048
    bindings: tuple[str, ...] = ()


_1B = {"vocab_size": 32_000, "embed_dim": 2048, "num_layers": 16, "num_heads": 16, "mlp_dim": 7168}
_7B = {"vocab_size": 32_000, "embed_dim": 4096, "num_layers": 32, "num_heads": 32, "mlp_dim": 11_008}
_256K = {"vocab_size": 262_144, "embed_dim": 2048, "num_layers": 2, "num_heads": 16, "mlp_dim": 8192}
_GEMMA = {
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 256,
    "head": "tied",
    "activation": "geglu",
    "norm_scale": "offset",
}
_GEMMA |= {"embedding_scale": "sqrt_dim", "norm_placement": "sandwich"}
_GEMMA2_2B = _GEMMA | {"vocab_size": 256_000, "embed_dim": 2304, "num_layers": 26, "mlp_dim": 9216, "window": 4096}
_GEMMA2_2B |= {"layer_pattern": ("local", "global"), "attention_soft_cap": 50.0, "logit_soft_cap": 30.0}
_GEMMA3_4B = _GEMMA | {"vocab_size": 262_208, "embed_dim": 2560, "num_layers": 34, "mlp_dim": 10_240, "window": 1024}
_GEMMA3_4B |= {"layer_pattern": ("local",) * 5 + ("global",), "qk_norm": "head"}
_GEMMA3_4B |= {"rope": {"theta": 1_000_000.0, "local_theta": 10_000.0, "scaling": "linear", "factor": 8.0}}
_OF_GEMMA = {"use_post_attn_norm": True, "use_post_ffw_norm": True, "mlp_activations": ["gelu", "linear"]}
_OF_GEMMA |= {"normalization_layer_epsilon": 1e-6, "logits_via_embedding": True}
_OF_GEMMA2 = _OF_GEMMA | {"decoder_block": "gemma2", "final_logits_soft_cap": 30.0, "attn_logits_soft_cap": 50.0}
_OF_GEMMA2 |= {"base_num_decoder_layers": 13, "sliding_window_size": 4096}  # a local and a global layer are one there
_OF_GEMMA3 = _OF_GEMMA | {"model_name": "gemma3-4b", "override_model_config": True}  # it asks for a name
_OF_GEMMA3 |= {"decoder_block": "gemma3", "sliding_window_size": 1024, "rope_max_timescale": 1_000_000}
_OF_GEMMA3 |= {"local_rope_max_timescale": 10_000, "rope_linear_scaling_factor": 8.0}
# The balance loss as in ours, else it is off there.
_MIXTRAL = {"model_name": "mixtral-8x7b", "load_balance_loss_weight": 0.02}
_DROPPING = {"sparse_matmul": False, "megablox": False, "capacity_factor": 1.25}
_CAPACITY = ('Moe.dispatch = "capacity"', "Moe.capacity_factor = 1.25")
_QWEN3_30B = {"model_name": "qwen3-30b-a3b", "load_balance_loss_weight": 0.001}
_GPT_OSS = {"model_name": "gpt-oss-20b", "load_balance_loss_weight": 0.001}
_QKV = {"remat": "save", "names": ("query", "key", "value"), "maxtext": "save_qkv_proj"}
ROWS = {
    "1b-1": Row(_1B, "v5e-64", 1, recorded_gib=0.75),
    "1b-12": Row(_1B, "v5e-64", 12, recorded_gib=3.76),
    "1b-mlp8192-6": Row(_1B | {"mlp_dim": 8192}, "v5e-64", 6, recorded_gib=2.26),
    "1b-12-v6e": Row(_1B, "v6e-64", 12, recorded_gib=4.24, options=True),
    "7b-4": Row(_7B, "v5e-64", 4, recorded_gib=11.34, **_QKV),
    "7b-5": Row(_7B, "v5e-64", 5, **_QKV),
    "7b-6": Row(_7B, "v5e-64", 6, recorded_gib=float("inf"), **_QKV),
    "7b-7": Row(_7B, "v5e-64", 7, recorded_gib=float("inf"), **_QKV),
    **{f"gemma2-2b-{n}": Row(_GEMMA2_2B, "v5e-64", n, family=_OF_GEMMA2, options=n == 1) for n in (1, 2, 4, 8)},
    **{f"gemma3-4b-{n}": Row(_GEMMA3_4B, "v5e-64", n, family=_OF_GEMMA3, options=n == 1) for n in (1, 2, 4, 8)},
    "8b-2": Row("llama3.1_8b", "v5e-64", 2, family={"model_name": "llama3.1-8b"}),
    "8b-8192": Row("llama3.1_8b", "v6e-64", 1, length=8192, family={"model_name": "llama3.1-8b"}),
    "qwen3-8b-2": Row("qwen3_8b", "v5e-64", 2, family={"model_name": "qwen3-8b"}),
    "qwen3-8b-8192": Row("qwen3_8b", "v6e-64", 1, length=8192, family={"model_name": "qwen3-8b"}),
    "mixtral-1": Row("mixtral_8x7b", "v5e-64", 1, family=_MIXTRAL),
    "qwen3-30b-1": Row("qwen3_30b_a3b", "v5e-64", 1, family=_QWEN3_30B),
    "gpt-oss-20b-1": Row("gpt_oss_20b", "v5e-64", 1, family=_GPT_OSS),
    "mixtral-2": Row("mixtral_8x7b", "v6e-64", 2, length=4096, family=_MIXTRAL),
    "mixtral-capacity-2": Row(
        "mixtral_8x7b",
        "v6e-64",
        2,
        length=4096,
        bindings=_CAPACITY,
        family=_MIXTRAL | _DROPPING,
    ),
    "qwen3-30b-2": Row("qwen3_30b_a3b", "v6e-64", 2, length=4096, family=_QWEN3_30B),
    "gpt-oss-20b-2": Row("gpt_oss_20b", "v6e-64", 2, length=4096, family=_GPT_OSS),
    "vocabulary-256k": Row(_256K, "v5e-64", 8, maxtext=None),
    "vocabulary-256k-whole": Row(_256K, "v5e-64", 8, maxtext=None, loss="whole logits"),
}


def compile_ours(row: Row, options: dict[str, str] | None, hlo: str | None = None) -> dict[str, Any]:
    """Lowers and compiles the train step that `capibara.train` runs; runs in a child process.

    `options` are the compiler's; None: those that `capibara.train` takes. `hlo`: a file for the optimised HLO.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    from capibara import sharding
    from capibara.models import api
    from capibara.objectives import base
    from capibara.planner.compiler import compile as planner
    from capibara.planner.hardware import slices, topology, xla_flags
    from capibara.planner.model import choice, memory, workload
    from capibara.training import setup

    if row.loss == "whole logits":
        base.cross_entropy = _whole_logits
    devices, chip = topology.slice_devices(row.slice), slices.parse(row.slice).chip
    trainer = trainer_of(row, len(devices))
    model = api.build(trainer.model)
    mesh = sharding.make_mesh(trainer.plan, devices)
    lowered = setup.lower_step(trainer, model, mesh)
    options = xla_flags.options(chip.name) if options is None else options
    report = planner.compile_train_step(lowered, options)
    if hlo:
        with open(hlo, "w", encoding="utf-8") as file:
            file.write(report.text)
    plan = choice.Choice(
        sizes=tuple(trainer.plan.axes[axis] for axis in sharding.MESH_AXES),
        rows=row.rows,
        remat=trainer.plan.remat_policy,
    )
    predicted = memory.memory(workload.of_run(trainer), plan, chip, most_bytes=chip.device_usable_hbm_bytes)
    model_flops = model.flops_per_token(row.length) * row.rows * row.length
    return report.to_json() | {"model_flops": model_flops, "predicted_bytes": predicted.peak}


def trainer_of(row: Row, devices: int) -> Any:
    """The run of a row."""
    from planner import Point, case

    from capibara import sharding
    from capibara.data.pipeline.loader import Dataset
    from capibara.models import api
    from capibara.models.parts.config import Head
    from capibara.optim import Optimizer, Schedule
    from capibara.training.trainer import Trainer

    if isinstance(row.model, str):
        mesh = {"fsdp": devices}
        point = Point(row.model, row.slice, mesh, row.rows, row.remat, row.names, row.length, bindings=row.bindings)
        return case(point).run
    names = {"remat_names": row.names} if row.names else {}
    fields = {"head": Head.SEPARATE} | row.model
    fields |= {"rope": api.Rope(**fields["rope"])} if "rope" in fields else {}
    return Trainer(
        model_dir="unused",
        steps=1000,
        model=api.DecoderConfig(**fields),
        plan=sharding.Plan(batch_size=row.rows * devices, fsdp=devices, remat=sharding.Remat(row.remat), **names),
        dataset=Dataset(mixture_or_task_name="unused", length=row.length),
        optimizer=Optimizer(schedule=Schedule(learning_rate=3e-4)),
    )


LOSS_FORMS = ("by blocks of tokens", "by parts of the vocabulary")


def compile_loss(row: Row, form: str) -> dict[str, Any]:
    """The loss of the row's head alone, with its gradients and sums, in one of LOSS_FORMS; runs in a child process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    from capibara import sharding
    from capibara.kernels.cross_entropy import dispatch
    from capibara.planner.compiler import compile as planner
    from capibara.planner.hardware import topology, xla_flags

    dispatch.by_vocabulary_on = lambda *_: form == LOSS_FORMS[1]
    devices, rules = topology.slice_devices(row.slice), sharding.Rules()
    B, V, D = row.rows * len(devices), row.model["vocab_size"], row.model["embed_dim"]
    mesh = sharding.make_mesh(sharding.Plan(batch_size=B), devices)

    def array(shape: tuple[int, ...], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, rules.spec(axes)))

    def loss(*arrays: jax.Array) -> Any:
        with sharding.activate(mesh, rules):
            return dispatch.cross_entropy(*arrays, soft_cap=row.model.get("logit_soft_cap"))

    hidden, head = array((B, row.length, D), jnp.bfloat16, "batch"), array((V, D), jnp.float32, "vocab", "embed")
    targets, weights = (array((B, row.length), dtype, "batch") for dtype in (jnp.int32, jnp.float32))
    gradients = jax.jit(
        jax.value_and_grad(loss, (0, 1), has_aux=True), out_shardings=(None, (hidden.sharding, head.sharding))
    )
    lowered = gradients.lower(hidden, head, targets, weights)
    return planner.compile_train_step(lowered, xla_flags.options(row.slice.partition("-")[0])).to_json()


def run_loss(name: str, form: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(HERE) + os.pathsep + os.environ.get("PYTHONPATH", "")}
    return _last_line([sys.executable, __file__, f"--child={name}", f"--form={form}"], environment)


def _whole_logits(hidden_BTD, head_VD, targets_BT, weights_BT, *, z_loss=0.0, soft_cap=None, trains_head=True):
    """Cross entropy as most write it: all logits at once, gradients by JAX."""
    del soft_cap, trains_head  # none here, and it is trained
    import jax
    import jax.numpy as jnp

    from capibara.kernels.cross_entropy.terms import LossSums

    logits = jnp.einsum("BTD,VD->BTV", hidden_BTD, head_VD.astype(hidden_BTD.dtype), preferred_element_type=jnp.float32)
    log_z_BT = jax.nn.logsumexp(logits, axis=-1)
    target_BT = jnp.take_along_axis(logits, targets_BT[..., None], axis=-1)[..., 0]
    nll, z, weight = (jnp.sum(x * weights_BT) for x in (log_z_BT - target_BT, log_z_BT**2, jnp.ones_like(weights_BT)))
    return nll + z_loss * z, LossSums(nll, z, jnp.zeros(()), weight)


def maxtext_settings(row: Row) -> dict[str, Any]:
    """The row in MaxText's keys."""
    settings = {
        "run_name": "tpu_compile",
        "base_output_directory": tempfile.gettempdir(),
        "compile_topology": row.slice,
        "compile_topology_num_slices": 1,
        "skip_jax_distributed_system": True,
        "enable_checkpointing": False,
        "dataset_type": "synthetic",
        "dtype": "bfloat16",
        "weight_dtype": "float32",
        "max_target_length": row.length,
        "per_device_batch_size": row.rows,
        "remat_policy": row.maxtext,
        "attention": "flash",
        "scan_layers": True,
        "ici_fsdp_parallelism": -1,
    }
    if isinstance(row.model, str):  # MaxText has a configuration of that name, too
        return settings | {"override_model_config": True} | row.family
    heads = row.model["num_heads"]
    return (
        settings
        | {
            "decoder_block": "llama2",
            "vocab_size": row.model["vocab_size"],
            "base_emb_dim": row.model["embed_dim"],
            "base_num_decoder_layers": row.model["num_layers"],
            "base_num_query_heads": heads,
            "base_num_kv_heads": row.model.get("num_kv_heads", heads),
            "head_dim": row.model.get("head_dim", row.model["embed_dim"] // heads),
            "base_mlp_dim": row.model["mlp_dim"],
            "logits_via_embedding": False,
        }
        | row.family
    )


def run_ours(
    name: str, layers: int | None, options: dict[str, str] | None = None, hlo: str | None = None
) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(HERE) + os.pathsep + os.environ.get("PYTHONPATH", "")}
    command = [sys.executable, __file__, f"--child={name}", f"--options={json.dumps(options)}"]
    command += [f"--layers={layers}"] if layers else []
    return _last_line(command + ([f"--hlo={hlo}"] if hlo else []), environment)


def run_maxtext(row: Row, python: str, options: dict[str, str] | None = None, hlo: str | None = None) -> dict[str, Any]:
    import libtpu

    from capibara.planner.compiler import hlo as reader

    environment = {**os.environ, "TPU_LIBRARY_PATH": libtpu.get_library_path()}
    environment.pop("PYTHONPATH", None)
    settings = maxtext_settings(row)
    if options:
        settings["compile_xla_flags"] = " ".join(f"--{name}={value}" for name, value in options.items())
    with tempfile.TemporaryDirectory() as folder:
        written = hlo or os.path.join(folder, "hlo.txt")
        command = [python, os.path.join(HERE, "peers", "maxtext_compile.py"), f"--hlo={written}"]
        line = _last_line([*command, "--settings=" + json.dumps(settings)], environment)
        text = ""
        if os.path.exists(written):
            with open(written, encoding="utf-8") as file:
                text = file.read()
    if "error" in line:
        from capibara.planner.compiler.compile import hbm_need, out_of_memory

        if not out_of_memory(line["error"]):
            raise SystemExit(f"MaxText failed: {line['error']}")
        return {"fits": False, "peak_bytes": hbm_need(line["error"])[0]}
    line |= {"fits": True, "peak_bytes": line["peak_memory_in_bytes"]}
    line |= {"argument_bytes": line["argument_size_in_bytes"], "temporary_bytes": line["temp_size_in_bytes"]}
    return line | ({"costs": vars(reader.costs(reader.parse(text)))} if text else {})


def measure(name: str, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Compiles and shows a row: (what was compiled, its result) as soon as it is there.

    A row with `options` is compiled on both sides again: ours with MaxText's compiler options, which are none, and MaxText
    with ours.
    """
    from capibara.planner.hardware import xla_flags

    row, python = cut(ROWS[name], options.layers), options.maxtext_python
    if options.loss:
        found = {}
        for form in LOSS_FORMS:
            found[form] = run_loss(name, form)
            yield form, found[form]
        show(f"{name}, loss alone", row, *(found[form] for form in reversed(LOSS_FORMS)), ("by parts", "by blocks"))
        return
    folder = options.hlo
    texts = {side: folder and os.path.join(folder, f"{name}.{side}.txt") for side in ("ours", "maxtext")}
    ours = run_ours(name, options.layers, hlo=texts["ours"])
    yield "ours", ours
    maxtext = run_maxtext(row, python, hlo=texts["maxtext"]) if python and row.maxtext else None
    yield "maxtext", maxtext
    show(name, row, ours, maxtext)
    if row.options and maxtext:
        plain = run_ours(name, options.layers, {})
        yield "ours, no options", plain
        show(f"{name}, without options", row, plain, maxtext)
        with_ours = run_maxtext(row, python, xla_flags.options(row.slice.partition("-")[0]))
        yield "maxtext, our options", with_ours
        show(f"{name}, both with our options", row, ours, with_ours)


def cut(row: Row, layers: int | None) -> Row:
    """The row with so many layers: whole patterns of them; None: all."""
    if layers is None:
        return row
    if isinstance(row.model, str):
        bindings = (*row.bindings, f"DecoderConfig.num_layers = {layers}")
        return dataclasses.replace(row, bindings=bindings, family=row.family | {"base_num_decoder_layers": layers})
    family = dict(row.family)
    if "base_num_decoder_layers" in family:
        family["base_num_decoder_layers"] = family["base_num_decoder_layers"] * layers // row.model["num_layers"]
    return dataclasses.replace(row, model=row.model | {"num_layers": layers}, family=family, recorded_gib=None)


def _last_line(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = child.stdout.strip().splitlines()
    if child.returncode or not lines:
        raise SystemExit(f"{' '.join(command)[:200]} failed:\n{child.stderr[-3000:]}")
    return json.loads(lines[-1])


def show(
    name: str,
    row: Row,
    ours: dict[str, Any],
    peer: dict[str, Any] | None,
    titles: tuple[str, str] = ("ours", "MaxText"),
) -> None:
    """Prints one row: ours, MaxText's, and the ratio ours / MaxText's; or two others under their titles."""
    print(
        f"\n{name}: {row.slice}, {row.rows} x {row.length} a chip, remat {' '.join((row.remat, *row.names))}, {row.loss}"
    )
    print(f"  {'':32}{titles[0]:>12}{titles[1]:>12}{'ratio':>8}")
    mine, theirs = lines(row, ours), lines(row, peer or {})
    if not peer and row.recorded_gib:
        theirs["peak HBM, GiB"] = row.recorded_gib
    for key in mine | theirs:
        a, b = mine.get(key), theirs.get(key)
        ratio = f"{a / b:8.3f}" if a and b and b != float("inf") else ""
        print(f"  {key:32}{_number(a)}{_number(b)}{ratio}", flush=True)


def lines(row: Row, result: dict[str, Any]) -> dict[str, float | None]:
    """The figures of one side, in the units they are printed in."""
    from capibara.planner.hardware import slices

    table: dict[str, float | None] = {}
    if not result:
        return table
    table["peak HBM, GiB"] = (result["peak_bytes"] or 0) / GIB or None
    if "predicted_bytes" in result:
        table["predicted peak, GiB"] = result["predicted_bytes"] / GIB
    table["fits (1: yes)"] = float(result["fits"])
    if not result["fits"]:
        return table
    costs = result["costs"]
    kernel_flops = costs["kernel_flops"] / 2  # the causal half
    table["arguments, GiB"] = result["argument_bytes"] / GIB
    table["temporaries, GiB"] = result["temporary_bytes"] / GIB
    table["matmul TFLOP"] = costs["matmul_flops"] / 1e12
    table["attention kernels, TFLOP"] = costs["kernel_flops"] / 1e12
    if "model_flops" in result:
        table["model TFLOP"] = result["model_flops"] / 1e12
        table["model / compiled"] = result["model_flops"] / (costs["matmul_flops"] + kernel_flops)
    table["HBM traffic, GB"] = costs["hbm_bytes"] / 1e9
    for kind, size in sorted(costs["collective_bytes"].items()):
        table[f"{kind}, GB"] = size / 1e9
    table["cycles, s"] = costs["cycles"] / slices.parse(row.slice).chip.clock_hz
    table["compile, s"] = result["compile_s"]
    return table


def _number(value: float | None) -> str:
    return f"{'' if value is None else 'too much' if value == float('inf') else f'{value:.3f}':>12}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"comma-separated: {', '.join(ROWS)}")
    parser.add_argument("--maxtext_python", help="python of an environment with maxtext[tpu]==0.2.5")
    parser.add_argument("--json", help="write the results there")
    parser.add_argument("--layers", type=int, help="of every row in place of its own: a quick look")
    parser.add_argument("--hlo", help="folder to keep the optimised HLO of both sides in")
    parser.add_argument("--loss", action="store_true", help="compile the loss alone, in both of our forms")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--form", choices=LOSS_FORMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        row = cut(ROWS[options.child], options.layers)
        found = compile_loss(row, options.form) if options.form else compile_ours(row, options.options, options.hlo)
        print(json.dumps(found), flush=True)
        return
    unknown = [name for name in options.rows.split(",") if name not in ROWS]
    if unknown:
        parser.error(f"--rows has {unknown[0]!r}: known are {', '.join(ROWS)}")
    results = {}
    for name in options.rows.split(","):
        for title, result in measure(name, options):
            results.setdefault(name, {})[title] = result
            if options.json:  # as they come: a row is minutes of work
                with open(options.json, "w", encoding="utf-8") as file:
                    json.dump(results, file, indent=1)
    if options.loss:
        return
    if {"vocabulary-256k", "vocabulary-256k-whole"} <= results.keys():
        whole, blocked = (results[f"vocabulary-256k{end}"]["ours"]["peak_bytes"] for end in ("-whole", ""))
        if whole and blocked:
            print(
                f"\nvocabulary 256k: whole logits need {whole / blocked:.2f} times the peak of ours (goal: at least 3)"
            )


if __name__ == "__main__":
    main()
