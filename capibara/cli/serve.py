"""Serves a model over HTTP with OpenAI's API: `python -m capibara.serve --model_dir=runs/quickstart`."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from capibara.cli.arguments import flags, multihost
from capibara.core.types import UserError

_KEY = "CAPIBARA_API_KEY"
_DESCRIPTION = f"""Serve a model over HTTP with OpenAI's API: /v1/completions, /v1/chat/completions (both can stream),
/v1/models, /health, /ready and /metrics; of a reward model /v1/score and /v1/rerank.

examples:
  python -m capibara.serve --model_dir=runs/finetune/adapted
  python -m capibara.serve --model=SmolLM2-135M-Instruct.gguf --gin.EngineConfig.slots=16
  python -m capibara.serve --model_dir=runs/reward --name=judge
  python -m capibara.serve --model=base --adapter=poet=peft/poet --adapter_folder=peft
  python -m capibara.serve --model=Qwen3-0.6B --index=data/docs
  python -m capibara.serve --model=Qwen3-0.6B --gin.ServerConfig.thinking='@SelfConsistency()'
  {_KEY}=... python -m capibara.serve --model_dir=runs/finetune/adapted --host=0.0.0.0 --gin.ServerConfig.queue=200

Requests name the model or an adapter; adapters stay unmerged and share batches. A prompt and its text may have the model's
own length; all slots share memory for EngineConfig.slots x Dataset.length tokens. Without a key only requests from this
machine are accepted, to localhost, 127.0.0.1, [::1] and ServerConfig.allowed_hosts; from web pages only of
ServerConfig.allowed_origins. The first SIGTERM or ctrl-C finishes the running requests, a second one aborts them.
On several hosts start the same command on each: all of them compute every token, and process 0 alone listens.
exit codes: 0 stopped by a signal; 1 the engine failed (clients received an error); 2 invalid input; 75 lost another
host: start the command again"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and serves until a signal arrives; returns the exit code."""
    parser = flags.ArgumentParser("capibara serve", _DESCRIPTION)
    flags.add_model(parser)
    flags.add_adapters(parser)
    parser.add_argument(
        "--adapter_folder",
        action="append",
        default=[],
        metavar="DIR",
        help="let clients load adapters of this folder (POST /v1/load_lora_adapter); repeatable",
    )
    parser.add_argument("--name", metavar="NAME", help="the model's name for clients; default: the folder's name")
    parser.add_argument(
        "--index", metavar="DIR", help="an index of capibara prepare index, which the model searches in chats"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one; default: 8000")
    parser.add_argument("--api_key_file", metavar="FILE", help=f"API keys, one per line; or set one in {_KEY}")
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices (1 to 64)")
    multihost.add_arguments(parser)
    args = flags.parse_arguments(parser, argv)
    if bool(args.model_dir) == bool(args.model):
        raise UserError("one of --model_dir and --model is needed, not both: try --model_dir=runs/quickstart")
    if not 0 <= args.port < 65536:
        raise UserError(f"--port={args.port} must be from 0 to 65535")
    return serve(args)


def serve(args: flags.Arguments) -> int:
    """Connects the processes, loads the model and serves until a signal or an engine failure; the exit code."""
    from capibara.core import devices, extras
    from capibara.multihost import channel

    for package in ("fastapi", "uvicorn", "prometheus_client"):
        extras.require(package, extra="serve", why="capibara serve")
    from capibara.cli.composition import serving
    from capibara.inference.server import server

    devices.start(args.emulate)
    multihost.join_all(args)
    line = channel.connect()
    if isinstance(line, channel.Follower):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda item, _: line.signal(item))
        serving.load(args, first=False)[0].engine.follow(line)
        return 0
    endpoint = server.open_endpoint(args.host, args.port, args.api_key_file, _KEY)
    tell = lambda served: print(f"{served.name} is at {endpoint.url}", flush=True)  # noqa: E731
    return server.run(endpoint.listening, endpoint.keys, lambda: serving.load(args), tell, args.host, line)
