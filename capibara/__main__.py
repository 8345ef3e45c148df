"""`capibara VERB ...` is `python -m capibara.VERB ...`."""

from __future__ import annotations

import importlib
import sys

from capibara import __version__
from capibara.core.fields import did_you_mean
from capibara.multihost import exits

VERBS = {
    "train": "train or fine-tune a model from a Gin file",
    "finetune": "train a model further on your data: adapters, all weights, preferences or rewards",
    "plan": "find mesh, batch and recomputation for a model on a TPU slice",
    "prove": "compile a run's train step for a TPU slice that is not there",
    "coordinate": "make one model of those that a group of runs sends",
    "infer": "continue a prompt with a trained model, or chat with it",
    "serve": "serve a model over HTTP with OpenAI's API",
    "track": "send a run's metrics to trackers, such as Weights & Biases",
    "report": "write one HTML file on runs, to be mailed",
    "evaluate": "score a model: its loss, its answers, or the tasks of lm-eval",
    "compare": "let two models answer the same prompts, and say which is better",
    "dashboard": "show runs in a browser, live",
    "launch": "run a verb and restart it, or make a job of a Gin file",
    "convert": "take models in and out; list, verify and prune checkpoints",
    "merge": "merge fine-tuned models into one",
    "experts": "measure the experts of a mixture; prune, merge, split or make them",
    "convert-config": "translate a Gin file of T5X",
    "doctor": "say what this machine has for each verb, and what it lacks",
    "prepare": "make data sets and vocabularies, and show where they come from",
}


def main() -> int:
    """Runs the verb that the first argument names; returns the exit code."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-h", "--help"):
        print("usage: capibara VERB [--help] ...\n\nverbs:")
        print("\n".join(f"  {name:<16}{text}" for name, text in VERBS.items()))
        return 0
    if verb == "--version":
        print(f"capibara {__version__}")
        return 0
    if verb not in VERBS:
        print(
            f"error: unknown verb {verb!r}{did_you_mean(verb, VERBS, 'verbs')} (see capibara --help)", file=sys.stderr
        )
        return exits.EXIT_USER_ERROR
    return exits.run_process(importlib.import_module(f"capibara.cli.{verb.replace('-', '_')}").main, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
