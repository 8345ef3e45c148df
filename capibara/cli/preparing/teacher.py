"""Stores what a teacher says of a run's data: `python -m capibara.prepare teacher`."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

from capibara.cli.arguments import flags
from capibara.core.types import UserError
from capibara.storage import outputs

_DESCRIPTION = """Store a teacher's most probable next tokens, and their log-probabilities, for the data of a run.

The run is that of the distillation, with TEACHER. Then it trains without the teacher, on the same data and tokenizer:

  python -m capibara.prepare teacher --gin_file=tasks/chat.gin --gin_file=runs/distill.gin --gin.MODEL=small \\
    --gin.TEACHER=large --gin.MODEL_DIR=runs/distilled --gin.TRAIN_STEPS=500 --gin.FILES="('chats.jsonl',)" \\
    --top_k=64 --output=runs/teacher
  python -m capibara.train --gin_file=tasks/chat.gin --gin_file=runs/distill.gin --gin.MODEL=small \\
    --gin.Distillation.stored=runs/teacher --gin.MODEL_DIR=runs/distilled --gin.TRAIN_STEPS=500 \\
    --gin.FILES="('chats.jsonl',)"

A position takes 8 bytes a token: with --top_k=64, 512 bytes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and asks the teacher; returns the exit code."""
    parser = flags.ArgumentParser("python -m capibara.prepare teacher", _DESCRIPTION)
    parser.add_argument("--top_k", type=int, default=64, metavar="N", help="tokens of each position (default 64)")
    parser.add_argument("--output", metavar="DIR", help="a new folder")
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices (1 to 64)")
    args = flags.parse_arguments(parser, argv)
    if not args.output:
        raise UserError("--output is missing: name a new folder, such as --output=runs/teacher")
    if os.path.exists(args.output):
        raise UserError(f"--output ({args.output}) exists: name a new folder")
    outputs.check_writable(os.path.join(args.output, "manifest.json"))

    from capibara import config
    from capibara.cli.composition import pretrained, training_run
    from capibara.core import devices
    from capibara.monitoring.status import StatusLine
    from capibara.strategies.distillation import storing
    from capibara.strategies.distillation.loss import Distillation

    devices.start(args.emulate)
    bindings = [*args.gin_bindings, f"Distillation.top_k = {args.top_k}"]
    trainer = pretrained.built(args.gin_file, bindings, args.gin_search_paths)
    config.check_used(trainer.later)
    loss = trainer.loss
    if not isinstance(loss, Distillation) or loss.teacher is None:
        raise UserError("the run has no teacher: add --gin_file=runs/distill.gin and --gin.TEACHER=runs/large")
    training_run.check_teacher(trainer)
    with StatusLine() as line:
        load = functools.partial(training_run.loader, dataset=trainer.dataset)
        stored = storing.store(trainer, loss, loss.teacher, args.output, load, line.show)
    print(
        f"{stored.documents} documents, {stored.positions} positions of {stored.top_k} tokens in {args.output}: train with "
        f"--gin.Distillation.stored={args.output} in the place of TEACHER"
    )
    return 0
