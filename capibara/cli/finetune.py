"""Fine-tunes a model on your data: `python -m capibara.finetune --model=... --data=chats.jsonl --out=runs/mine`."""

from __future__ import annotations

from collections.abc import Sequence

from capibara.cli.arguments import flags, multihost
from capibara.core.types import UserError

_METHODS = "lora qlora full distill duo_attention dpo orpo simpo cpo kto reward process_reward".split()
_REWARDED = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce_pp", "ppo", "online_dpo")
_DESCRIPTION = """Fine-tune a decoder on JSON lines: texts, chats in any usual layout, preferences, or questions with rewards.

  --model   a Hugging Face folder, a .gguf file, a run folder, or a name on the Hugging Face Hub (OWNER/NAME)
  --data    files, globs or folders of JSON lines; Parquet or CSV files; or a data set of the Hub (OWNER/NAME:SPLIT); repeatable
  --method  lora: adapters (the default); qlora: on a base in 4 bits; full: all weights; distill: adapters, on the next-token
            distributions of --teacher; duo_attention: gates that say which heads must see long texts whole; dpo, orpo, simpo,
            cpo: adapters, on lines with "chosen" and "rejected"; kto: adapters, on lines with a "label", true or false; reward:
            adapters and a head that scores answers, on lines with "chosen" and "rejected"; process_reward: of steps, on lines
            with "steps" and "labels"; grpo and the others: adapters, on its own answers (--gin.REWARDS="(@numeric_answer,)")

It prints the command of `capibara train` that is the same run; run it again to resume.

examples:
  python -m capibara.finetune --model=SmolLM2-135M-Instruct --data=chats.jsonl --out=runs/mine
  python -m capibara.finetune --model=HuggingFaceTB/SmolLM2-135M-Instruct --data=chats/ --out=runs/mine --epochs=3
  python -m capibara.finetune --model=runs/mine --data=pairs.jsonl --out=runs/preferred --method=dpo --lr=5e-5

exit codes: as for train"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and trains; returns the exit code."""
    parser = flags.ArgumentParser("capibara finetune", _DESCRIPTION)
    parser.add_argument("--model", metavar="PATH", help="the model that is trained further")
    parser.add_argument("--data", action="append", default=[], metavar="FILE", help="JSON lines; repeatable")
    parser.add_argument("--out", metavar="DIR", help="the run folder")
    parser.add_argument("--method", default="lora", choices=(*_METHODS, *_REWARDED), help="default: lora")
    parser.add_argument("--teacher", metavar="PATH", help="of method distill: the model that is learned from")
    parser.add_argument(
        "--eval", action="append", default=[], metavar="FILE", help="for evaluations; default: 3%% of --data"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="default: one pass over the data")
    parser.add_argument("--epochs", type=int, metavar="N", help="passes over the data, in place of --steps")
    parser.add_argument(
        "--lr", type=float, metavar="X", help="highest learning rate; default: by method and model size"
    )
    parser.add_argument("--batch_size", type=int, metavar="N", help="rows of a step; default: by method, 8 to 64")
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens of a row; default: 1024, or what the model reads"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of adapters and of the data's order")
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices (1 to 64)")
    parser.add_argument("--check", action="store_true", help="only check what the run is given: nothing is written")
    multihost.add_arguments(parser)
    args = flags.parse_arguments(parser, argv)
    for flag, value, example in (
        ("model", args.model, "SmolLM2-135M"),
        ("data", args.data, "chats.jsonl"),
        ("out", args.out, "runs/mine"),
    ):
        if not value:
            raise UserError(f"--{flag} has no value: name one, e.g. --{flag}={example}")
    return finetune(args)


def finetune(args: flags.Arguments) -> int:
    """Chooses the run and trains it; returns the exit code."""
    from capibara.cli.composition import finetuning, training_run
    from capibara.monitoring.status import StatusLine

    asked = finetuning.FineTuning(
        model=args.model,
        files=tuple(args.data),
        out=args.out,
        method=finetuning.Method(args.method),
        teacher=args.teacher,
        validation_files=tuple(args.eval),
        steps=args.steps,
        epochs=args.epochs,
        learning_rate=args.lr,
        batch_size=args.batch_size,
        length=args.length,
        seed=args.seed,
        gin_files=tuple(args.gin_file),
        bindings=tuple(args.gin_bindings),
        search_paths=tuple(args.gin_search_paths),
    )
    with StatusLine() as line:
        chosen = finetuning.choose(asked, line.show)
    print(*chosen.notes, f"the same run: {chosen.command}", sep="\n", flush=True)
    outcome = training_run.train_gin(
        chosen.gin_files,
        chosen.bindings,
        chosen.search_paths,
        args.emulate,
        joined=multihost.of(args),
        check=args.check,
    )
    return 128 + outcome.signal_number if outcome.signal_number else 0
