"""Continues a prompt with a trained model, or answers it: `python -m capibara.infer --model_dir=runs/quickstart --prompt="def "`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence

from capibara import cli, outputs
from capibara.types import UserError

_DESCRIPTION = """Continue a prompt with a model from a run folder; an encoder-decoder answers it.

examples:
  python -m capibara.infer --model_dir=runs/quickstart --prompt="def "
  python -m capibara.infer --model_dir=runs/quickstart --prompt="import " --gin.Sampling.temperature=0
  echo "class " | python -m capibara.infer --model_dir=runs/quickstart --gin.Sampling.top_p=0.9"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and prints the prompt with its continuation, or its answer; returns the exit code."""
    parser = cli.ArgumentParser("capibara infer", _DESCRIPTION)
    parser.add_argument("--model_dir", metavar="DIR", help="run folder: its config.gin and newest checkpoint are used")
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue; default: standard input")
    args = cli.parse_arguments(parser, argv)
    if not args.model_dir:
        raise UserError("--model_dir has no value: name a run folder, e.g. --model_dir=runs/quickstart")
    recorded = os.path.join(args.model_dir, "config.gin")
    if (configuration := outputs.read(recorded)) is None:
        raise UserError(f"--model_dir={args.model_dir} is not a run folder: {recorded} is missing; train one first")
    prompt = sys.stdin.read().rstrip("\n") if args.prompt is None else args.prompt
    with tempfile.NamedTemporaryFile("w", suffix=".gin") as copy:  # Gin reads no buckets
        copy.write(configuration)
        copy.flush()
        print(answer(args.model_dir, [copy.name, *args.gin_file], args, prompt))
    return 0


def answer(model_dir: str, gin_files: Sequence[str], args, prompt: str) -> str:
    """`prompt` continued, or answered, by the run's newest checkpoint (its averaged parameters where it kept them)."""
    import jax

    from capibara import config, devices
    from capibara.inference.sample import Generator, Sampling, check_generates
    from capibara.models import api
    from capibara.training.checkpoints import Checkpoints
    from capibara.training.trainer import Trainer

    config.parse(gin_files, args.gin_bindings, args.gin_search_paths)
    trainer, sampling = config.build(Trainer), config.build(Sampling)
    config.check_used()
    devices.skip_absent_tpu()
    devices.use_compilation_cache()
    model, dataset = api.build(trainer.model), trainer.dataset
    check_generates(model)
    on_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=on_device), model.abstract_params)
    with Checkpoints(model_dir, trainer.checkpointing, read_only=True) as checkpoints:
        params = checkpoints.restore_newest_params(target)
        if params is None:
            raise UserError(f"{model_dir} holds no checkpoint yet: train it first")
    generate = Generator(model, dataset.get_vocabulary(), dataset.length, sampling, dataset.encoder_length)
    return generate(params, prompt) if dataset.encoder_length else prompt + generate(params, prompt)


if __name__ == "__main__":
    sys.exit(cli.run_verb(main))
