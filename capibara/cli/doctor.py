"""Says what this machine has for each verb, and what it lacks: `python -m capibara.doctor`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from capibara.cli.arguments import flags
from capibara.core import extras, limits
from capibara.storage import outputs

_DESCRIPTION = """Say what is here: devices, memory, packages, which extras are installed, and what a verb lacks without them.

examples:
  python -m capibara.doctor
  python -m capibara.doctor --json=doctor.json

exit codes: 0 whatever is missing, 2 invalid input"""
# What an extra is for, in the words of --help; of the others their name says it.
USES = {
    "seqio": "train, evaluate: SeqIO tasks",
    "hf": "train: Hugging Face data sets; models by their names on the Hub",
    "tpu": "train on TPUs; prove, plan --verify",
    "gpu": "train on NVIDIA's GPUs",
    "gguf": "convert, infer, serve: GGUF files",
    "grammar": "infer, serve: structured output, forced tool calls",
    "serve": "serve",
    "evaluation": "evaluate: BLEU and ROUGE",
    "harness": "evaluate --harness",
    "verifiers": "train, finetune: @MathAnswer(), @JsonAnswer()",
    "privacy": "train: Trainer.privacy",
    "launch": "launch: Cloud TPU, Vertex AI, GKE, Bayesian sweeps",
    "builders": "prepare",
    "retrieval": "prepare index, prepare raft: search by faiss",
    "beam": "prepare corpus on Apache Beam",
    "dashboard": "dashboard",
    "parquet": "train: Parquet files",
    "encryption": "train: encrypted checkpoints",
    "gcs": "gs:// everywhere",
    "s3": "s3:// everywhere",
    "wandb": "train, track: Weights & Biases",
    "mlflow": "train, track: MLflow",
    "comet": "train, track: Comet",
    "docs": "make site, make notebooks",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and prints what is here; returns the exit code."""
    parser = flags.ArgumentParser("capibara doctor", _DESCRIPTION)
    parser.add_argument("--json", metavar="FILE", help="also write it to this file")
    return doctor(flags.parse_arguments(parser, argv))


def doctor(args: flags.Arguments) -> int:
    """Prints what is here and what is missing; returns the exit code."""
    if args.json is not None:
        outputs.check_writable(args.json)
    import jax

    from capibara.core import devices as of_jax
    from capibara.monitoring.system import facts

    of_jax.start()

    devices = jax.devices()
    here = facts.of_process(f"{len(devices)} x {devices[0].device_kind}", jax.process_count())
    lacking = {extra: extras.missing(extra) for extra in USES}
    memory = limits.host_bytes() / 2**30
    print(f"capibara {here['capibara']}, Python {here['python']}, {here['os']}")
    print(f"{here['devices']}; {here['cpus']} cores ({here['cpu']}), {memory:.1f} GiB of memory")
    print(", ".join(f"{name} {version}" for name, version in here["packages"].items()))
    print()
    for extra, use in USES.items():
        absent = lacking[extra]
        state = "not known" if absent is None else f"lacks {', '.join(absent)}" if absent else "installed"
        print(f"  {extra:<11}{use:<66}{state}")
    missing = [extra for extra, absent in lacking.items() if absent]
    if missing:
        print(f"\nto install one: {extras.install_command(missing[0])}")
    if args.json is not None:
        retained = {name: value for name, value in here.items() if name not in ("command", "git", "host")}
        outputs.save(args.json, json.dumps(retained | {"missing": lacking}, indent=1) + "\n")
    return 0
