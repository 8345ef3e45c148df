"""Scores a model: `python -m capibara.evaluate --model_dir=runs/mine --gin_file=evaluation/questions.gin`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from capibara.cli.arguments import flags, multihost
from capibara.core.types import UserError

_DESCRIPTION = """Score a model: its loss on held-out text, its answers to tasks, or EleutherAI's evaluation harness.

A task is bound in Gin under its name, as qa/EvalTask.files = ("qa.jsonl",); capibara's gin/evaluation/ has common ones.
--task=validation is the run's validation split; --task=seqio:NAME is a SeqIO task with its own metrics.

examples:
  python -m capibara.evaluate --model_dir=runs/quickstart
  python -m capibara.evaluate --model_dir=runs/mine --gin_file=evaluation/questions.gin --gin.QUESTIONS='("qa.jsonl",)'
  python -m capibara.evaluate --model=Qwen3-0.6B --gin_file=my_tasks.gin --task=qa,code --out=results.json
  python -m capibara.evaluate --model=model.gguf --harness=my_task --harness_path=tasks/ --out=harness.json

exit codes: 0 finished, 1 crashed, 2 invalid input, 75 lost another process: run the same command again"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, evaluates and prints a table; returns the exit code."""
    parser = flags.ArgumentParser("capibara evaluate", _DESCRIPTION)
    flags.add_model(parser)
    parser.add_argument("--task", action="append", default=[], metavar="NAME", help="repeatable or comma-separated")
    parser.add_argument("--out", metavar="FILE", help="write the results to this file, as JSON")
    parser.add_argument("--predictions", metavar="FILE", help="write the answers to this .jsonl; resumes from its end")
    parser.add_argument("--limit", type=int, metavar="N", help="most examples of a task (batches of validation)")
    parser.add_argument("--weights", choices=("ema", "raw"), help="of a run; default: its moving averages, if any")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint step of a run; default: the newest")
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices (1 to 64)")
    parser.add_argument("--harness", metavar="TASKS", help="tasks of lm-eval, comma-separated, instead of ours")
    parser.add_argument("--harness_path", metavar="DIR", help="folder of its YAML tasks")
    multihost.add_arguments(parser)
    args = flags.parse_arguments(parser, argv)
    _check(args)
    run(args)
    return 0


def _check(args: argparse.Namespace) -> None:
    if bool(args.model_dir) == bool(args.model):
        raise UserError("pass one of --model_dir (a run folder) and --model (a Hugging Face folder or .gguf file)")
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit={args.limit} must be at least 1")
    if args.harness and (args.task or args.predictions):
        raise UserError("--harness excludes --task and --predictions: leave them out, or evaluate them separately")
    if args.harness_path and not args.harness:
        raise UserError("--harness_path needs --harness: name a task in it, e.g. --harness=my_task")


def run(args: argparse.Namespace) -> None:
    """Evaluates as the flags say."""
    import jax

    from capibara.cli.composition import evaluation_tasks, models
    from capibara.core import devices
    from capibara.evaluation import evaluate as evaluation
    from capibara.monitoring.status import StatusLine
    from capibara.multihost import channel, hosts
    from capibara.storage import outputs

    devices.start(args.emulate)
    multihost.join_all(args)
    channel.watch()
    written = [*filter(None, (args.out, args.predictions))]
    hosts.of_first(lambda: outputs.check_writable(*written, inputs=args.gin_file))
    with StatusLine() as line:
        show = line.show if jax.process_index() == 0 else lambda *_: None
        show("reading", path := args.model_dir or args.model)
        subject = models.open_subject(
            path, args.gin_file, args.gin_bindings, args.gin_search_paths,
            step=args.step, weights=args.weights, trust=args.trust_config,
        )  # fmt: skip
        subject.vocabulary.tell_beginning()
        if args.harness:
            from capibara.evaluation import harness

            options = evaluation_tasks.harness_options(subject)
            result = harness.evaluate(subject, args.harness.split(","), options, args.harness_path, args.limit)
            lines = harness.table(result)
        else:
            tasks = evaluation_tasks.select(args.task, args.limit, subject)
            hosts.of_first(lambda: outputs.check_writable(*written, inputs=evaluation.files_of(tasks)))
            result = evaluation.evaluate(subject, tasks, limit=args.limit, predictions=args.predictions, show=show)
            lines = evaluation.table(result)
    if jax.process_index() > 0:
        return
    print(*lines, sep="\n")
    if args.out:
        outputs.save(args.out, json.dumps(result, indent=1, ensure_ascii=False, default=str) + "\n")
