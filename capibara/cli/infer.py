"""Continues or answers a prompt: `python -m capibara.infer --model_dir=runs/quickstart --prompt="def "`."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence

from capibara.cli.arguments import flags, multihost
from capibara.core.types import UserError
from capibara.storage import outputs

_DESCRIPTION = """Continue a prompt with a model; an encoder-decoder answers it.

examples:
  python -m capibara.infer --model_dir=runs/quickstart --prompt="def "
  echo "class " | python -m capibara.infer --model_dir=runs/quickstart --gin.Sampling.top_p=0.9
  python -m capibara.infer --model_dir=runs/quickstart --prompts=prompts.jsonl --out=texts.jsonl
  python -m capibara.infer --model=SmolLM2-135M-Instruct.gguf --chat --prompt="What is a capybara?"
  python -m capibara.infer --model_dir=runs/chat --chat --document=book.txt --prompt="Who did it?"
  python -m capibara.infer --model_dir=runs/quickstart --benchmark --gin.EngineConfig.slots=8"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and prints the prompt with its continuation, or its answer; returns the exit code."""
    parser = flags.ArgumentParser("capibara infer", _DESCRIPTION)
    flags.add_model(parser)
    flags.add_adapters(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue; default: standard input")
    parser.add_argument("--prompts", metavar="FILE", help='a prompt a line, or .jsonl: {"prompt": .., "adapter": ..}')
    parser.add_argument("--out", metavar="FILE", help="jsonl file for the texts of --prompts; resumes from its end")
    parser.add_argument("--chat", action="store_true", help="prompts are a user's turns; interactive in a terminal")
    parser.add_argument(
        "--document", metavar="FILE", help="text of any length that --prompt asks about, read in chunks"
    )
    parser.add_argument("--benchmark", action="store_true", help="print tokens per second and latencies, no text")
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices (1 to 64)")
    multihost.add_arguments(parser)
    args = flags.parse_arguments(parser, argv)
    if not (args.model_dir or args.model):
        raise UserError("--model_dir has no value: name a run folder, e.g. --model_dir=runs/quickstart")
    if args.model_dir and args.model:
        raise UserError(f"--model_dir={args.model_dir} and --model={args.model}: leave one out")
    if bool(args.prompts) != bool(args.out):
        raise UserError("--prompts and --out go together: name both files, e.g. --prompts=in.jsonl --out=out.jsonl")
    if args.document and (args.prompts or args.benchmark or not args.prompt):
        raise UserError("--document excludes --prompts and --benchmark, and needs --prompt: pass it, the question")
    if args.model_dir and outputs.read(recorded := os.path.join(args.model_dir, "config.gin")) is None:
        raise UserError(f"--model_dir={args.model_dir} is not a run folder: no {recorded}; other models: --model")
    run(args)
    return 0


def run(args: flags.Arguments) -> None:
    """Runs the flags' request with the run's newest checkpoint (its moving averages if it keeps them)."""
    from capibara import config
    from capibara.cli.composition import generation, models
    from capibara.core import devices
    from capibara.inference import sample, speed
    from capibara.inference.engine.engine import EngineConfig
    from capibara.inference.interactive import files, terminal
    from capibara.multihost import channel, hosts

    devices.start(args.emulate)
    multihost.join_all(args, tell=lambda joined: print(joined, file=sys.stderr))
    if args.out:
        hosts.of_first(lambda: outputs.check_writable(args.out, inputs=[*args.gin_file, args.prompts]))
    line = channel.connect()
    loaded = models.load_served(args)
    data, about, names = loaded.dataset, loaded.about, [*loaded.paths, None]
    length, encoder_length, sampling = data.length, data.encoder_length, config.build(sample.Sampling)
    batching, talk = config.build(EngineConfig), models.chat_of(data) if args.chat else None
    typed = talk and args.prompt is None and not args.prompts and sys.stdin.isatty()
    thinker = generation.thinker_of(args, sampling, bool(typed))
    opened = generation.open_reading(args, data, talk, sampling)
    config.check_used()
    batchings = {"many": batching, "typed": dataclasses.replace(batching, slots=1), "one": sample.of_one_slot(batching)}
    if isinstance(line, channel.Follower):
        how = next(messages := iter(line))["how"]
        models.engine_of(loaded, batchings[how]).follow(messages)
        return
    prompts = files.read_prompts(args.prompts, sampling, [*loaded.paths]) if args.prompts else []
    how = "many" if args.prompts or args.benchmark or thinker else "typed" if typed else "one"
    with channel.leading(line, {"how": how}) as send:
        engine = models.engine_of(loaded, batchings[how])
        engine.lead(send)
        if opened is not None:
            generation.read_document(engine, loaded, batchings["one"], opened, names[0])
        elif args.benchmark:
            prompt_length, rows = (encoder_length or length) // 2, loaded.tokenizer.size
            print(speed.report(engine, sampling, prompt_length, rows, names[0]))
        elif args.prompts:
            about |= {"cache_dtype": str(batching.cache_dtype), "length": length, "chat": args.chat}
            generation.complete_prompts(engine, prompts, args.out, talk, about, thinker)
        elif not typed:
            generation.answer_prompt(engine, args.prompt, data, talk, thinker, sampling, names[0])
        elif talk is not None:
            with engine.start():
                terminal.Talk(engine, talk, length, sampling, terminal.write, names[0]).run()
