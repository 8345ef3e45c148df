"""Makes a pattern of streaming heads out of trained gates: `python -m capibara.prepare streaming_heads`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from capibara.cli.arguments import flags
from capibara.core.types import UserError
from capibara.storage import outputs

if TYPE_CHECKING:
    import numpy as np

    from capibara.models.api import StreamingHeads

_DESCRIPTION = """Make a pattern of streaming heads out of the gates of a run with @DuoAttention().

  python -m capibara.prepare streaming_heads --run=runs/gates --share=0.5 --output=SmolLM2/streaming_heads.json
  python -m capibara.serve --model=SmolLM2 --gin.DecoderConfig.streaming=@read_streaming_heads() \\
    --gin.read_streaming_heads.path="'SmolLM2/streaming_heads.json'"

--gates reads a folder of the DuoAttention project (full_attention_heads.tsv, config.json) in the place of a run, and
--duo_attention writes one. Sizes are those of the training; the authors serve with 64 sink tokens and 256 recent ones."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and writes the pattern; returns the exit code."""
    parser = flags.ArgumentParser("python -m capibara.prepare streaming_heads", _DESCRIPTION)
    parser.add_argument("--run", metavar="DIR", help="a run folder with gates")
    parser.add_argument("--gates", metavar="DIR", help="in its place, a folder of the DuoAttention project")
    parser.add_argument("--share", type=float, metavar="X", help="of the heads, those that retrieve: the largest gates")
    parser.add_argument("--threshold", type=float, metavar="X", help="in its place, the least gate that retrieves")
    parser.add_argument("--sink_tokens", type=int, metavar="N", help="default: those of the training")
    parser.add_argument("--recent_window", type=int, metavar="N", help="default: that of the training")
    parser.add_argument("--output", metavar="FILE", help="the pattern, such as MODEL/streaming_heads.json")
    parser.add_argument("--duo_attention", metavar="DIR", help="also write the gates as the DuoAttention project does")
    args = flags.parse_arguments(parser, argv)
    if (args.run is None) == (args.gates is None):
        raise UserError("exactly one of --run and --gates is needed: try --run=runs/gates")
    if not args.output:
        raise UserError("--output is missing: name a file, such as --output=SmolLM2/streaming_heads.json")
    outputs.check_writable(args.output)

    from capibara.models import head_patterns

    gates_LK, sizes = _of_run(args.run) if args.gates is None else head_patterns.read_gates(args.gates)
    options = {
        name: getattr(args, name) for name in ("sink_tokens", "recent_window") if getattr(args, name) is not None
    }
    heads = head_patterns.streaming(gates_LK, share=args.share, threshold=args.threshold)
    pattern = dataclasses.replace(sizes, heads=heads, **options)
    gates_files = head_patterns.written_gates(pattern, gates_LK) if args.duo_attention else {}
    outputs.save(args.output, head_patterns.written(pattern, gates_LK))
    for name, text in gates_files.items():
        outputs.save(os.path.join(args.duo_attention, name), text)
    count = sum(map(len, heads))
    print(
        f"{count} of {gates_LK.size} heads stream ({pattern.sink_tokens} sink tokens, {pattern.recent_window} recent ones): serve with "
        f"--gin.DecoderConfig.streaming=@read_streaming_heads() --gin.read_streaming_heads.path=\"'{args.output}'\""
    )
    return 0


def _of_run(path: str) -> tuple[np.ndarray, StreamingHeads]:
    """The gates [L, K] of a run, nan where a layer has a window or no attention, and the sizes of its training.

    Raises:
      UserError: it is no run, or has no gates.
    """
    import numpy as np

    from capibara.cli.composition import models
    from capibara.models.api import GATES

    run = models.load_run(path)
    config = run.model.config
    if config.streaming is None or not config.has_gates:
        raise UserError(
            f"{path} has no gates: name a run with Trainer.loss = @DuoAttention() (--gin_file=runs/duo_attention.gin)"
        )
    gates_LK = np.clip(np.asarray(run.params[GATES], np.float32), 0, 1)
    has_all_keys = np.array([window is None for window in config.windows])
    return np.where(has_all_keys[:, None], gates_LK, np.nan), config.streaming
