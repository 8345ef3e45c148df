"""Trains a model from a Gin file: `python -m capibara.train --gin_file=quickstart.gin --emulate=8`."""

from __future__ import annotations

from collections.abc import Sequence

from capibara.cli.arguments import flags, multihost
from capibara.core.multihost import joining
from capibara.core.types import UserError

_DESCRIPTION = """Train a model as a Gin file describes; run it again to resume from the last checkpoint.

examples:
  python -m capibara.train --gin_file=quickstart.gin --emulate=8
  python -m capibara.train --gin_file=base_v5e64.gin --emulate=8 --gin.TRAIN_STEPS=3
  python -m capibara.train --gin_file=my_run.gin --gin.MODEL_DIR=runs/mine --gin.TRAIN_STEPS=20000

exit codes: 0 finished, 1 a crash, corruption or silent corruption, 2 invalid input, 75 hung, or to be run again,
130 / 143 stopped by ctrl-C / SIGTERM after a checkpoint"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and trains; returns the exit code."""
    parser = flags.ArgumentParser("capibara train", _DESCRIPTION)
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices (1 to 64)")
    parser.add_argument("--start_over", action="store_true", help="rename MODEL_DIR if it exists, and start a new run")
    multihost.add_arguments(parser)
    args = flags.parse_arguments(parser, argv)
    if not args.gin_file:
        raise UserError("--gin_file has no value: name a run file, e.g. --gin_file=quickstart.gin")
    files, joined = (args.gin_file, args.gin_bindings, args.gin_search_paths), multihost.of(args)
    return train(*files, args.emulate, start_over=args.start_over, joined=joined)


def train(
    gin_files: Sequence[str],
    bindings: Sequence[str],
    search_paths: Sequence[str],
    emulate: int | None,
    *,
    start_over: bool = False,
    joined: joining.Joining = joining.Joining(),
) -> int:
    """Trains the run that the Gin files describe; returns the exit code."""
    import jax

    from capibara import config
    from capibara.core import devices
    from capibara.core.multihost import channel, hosts
    from capibara.evaluation import judging
    from capibara.inference.sample import SampleText, sampler
    from capibara.interop.peft import runs as adapters
    from capibara.models import api
    from capibara.monitoring.defaults import Monitoring
    from capibara.planner.hardware import chips, xla_flags
    from capibara.planner.search import automatic
    from capibara.training import emulation, loop, run_folder
    from capibara.training.trainer import Trainer

    config.parse(gin_files, bindings, search_paths)
    trainer = config.build(Trainer)
    devices.start(emulate)
    facts = {"configuration": config.operative()}
    joining.join(joined, facts, emulated=emulate is not None, heartbeat_s=trainer.heartbeat_s)
    channel.watch()
    if start_over:
        run_folder.start_over(trainer.model_dir)
    run_folder.check_resumable(trainer.model_dir)
    trainer = run_folder.own_tokenizer.of_run(trainer)
    more, title = automatic.bindings(trainer) if emulate is None else emulation.bindings(trainer, jax.device_count())
    if more:
        if jax.process_index() == 0:
            print(title, *more, sep="\n  ")
        config.parse(gin_files, [*bindings, *more], search_paths)
        trainer = run_folder.own_tokenizer.of_run(config.build(Trainer))
    dataset, chip = trainer.dataset, jax.devices()[0].device_kind
    dataset.preload()
    model = api.build(trainer.model)
    texts, callbacks, judge = config.build(SampleText), config.build(Monitoring).build(), judging.of_run(trainer, model)
    notes = [*(f"note: {line}" for line in config.check_used(trainer.later)), *run_folder.changes(trainer.model_dir)]
    print(*(f"{line}\n" for line in notes if jax.process_index() == 0), sep="", end="")
    sampled = (dataset.get_vocabulary, dataset.length, texts, dataset.encoder_length, trainer.plan.rules)
    outcome = loop.train(
        trainer,
        callbacks,
        sampler=sampler(model, *sampled, gathered=hosts.gathered),
        judge=judge,
        peak_flops=chips.peak_flops(chip) if trainer.model.dtype == "bfloat16" else None,
        compiler_options=xla_flags.options(chip, tensor=trainer.plan.tensor),
        config=config.operative(),
        load=lambda path: adapters.loader(path, model, merge=trainer.init_with == "merged"),
    )
    return 128 + outcome.signal_number if outcome.signal_number else 0
