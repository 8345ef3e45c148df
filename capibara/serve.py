"""Serves a model over HTTP with OpenAI's API: `python -m capibara.serve --model_dir=runs/quickstart`."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Sequence

from capibara import cli
from capibara.types import UserError

_KEY = "CAPIBARA_API_KEY"
_DESCRIPTION = f"""Serve a model over HTTP with OpenAI's API: /v1/completions, /v1/chat/completions (both also as streams),
/v1/models, /health, /ready and /metrics.

examples:
  python -m capibara.serve --model_dir=runs/finetune/adapted
  python -m capibara.serve --model=SmolLM2-135M-Instruct.gguf --gin.EngineConfig.slots=16
  {_KEY}=... python -m capibara.serve --model_dir=runs/finetune/adapted --host=0.0.0.0 --gin.ServerConfig.queue=200

A slot holds Dataset.length tokens of prompt and text. Without a key only this machine is served, by the names localhost,
127.0.0.1, [::1] and those of ServerConfig.allowed_hosts; web pages only from ServerConfig.allowed_origins. SIGTERM or
ctrl-C lets the texts at hand end, a second one does not.
exit codes: 0 ended by a signal; 1 the engine failed, all who waited were told; 2 a mistake in what was given"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and serves until a signal comes; returns the exit code."""
    parser = cli.ArgumentParser("capibara serve", _DESCRIPTION)
    parser.add_argument("--model_dir", metavar="DIR", help="run folder: its config.gin and newest checkpoint are used")
    parser.add_argument("--model", metavar="PATH", help="instead: a Hugging Face folder or a .gguf file")
    parser.add_argument("--name", metavar="NAME", help="what clients call the model; default: the folder's name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: this machine's own")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free; default: 8000")
    parser.add_argument("--api_key_file", metavar="FILE", help=f"keys of clients, one a line; or one in {_KEY}")
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices (1 to 64)")
    cli.add_trust(parser)
    args = cli.parse_arguments(parser, argv)
    if bool(args.model_dir) == bool(args.model):
        raise UserError("one of --model_dir and --model is needed: name a run folder, e.g. --model_dir=runs/quickstart")
    if not 0 <= args.port < 65536:
        raise UserError(f"--port={args.port} must be from 0 to 65535")
    return serve(args)


def serve(args) -> int:
    """Listens at once, loads the model, and answers until a signal comes or the engine fails; returns the exit code."""
    from capibara import devices, extras

    for package in ("fastapi", "uvicorn", "prometheus_client"):
        extras.require(package, extra="serve", why="capibara serve")
    from capibara.inference import server

    keys = server.keys_of(args.api_key_file, _KEY)
    try:
        listening = server.listen(args.host, args.port)
    except (OSError, UnicodeError) as error:  # the latter: a name that no host may have
        raise UserError(f"--host={args.host} --port={args.port} cannot be listened at ({error}): try others") from None
    address, port = listening.getsockname()[:2]
    if not keys and not ipaddress.ip_address(address).is_loopback:
        raise UserError(f"--host={args.host} lets other machines in: set {_KEY} or --api_key_file, or leave --host out")
    devices.start(args.emulate)
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}/v1"
    tell = lambda served: print(f"{served.name} is at {url}", flush=True)  # noqa: E731
    return server.run(listening, keys, lambda: _load(args), tell, args.host)


def _load(args):
    """The model with its engine, and what the server takes on."""
    from capibara import config, loading
    from capibara.inference import chat, serving_mesh
    from capibara.inference.engine import Engine, EngineConfig
    from capibara.inference.sampling import Sampling
    from capibara.inference.service import Served, ServerConfig
    from capibara.monitoring.status import StatusLine

    path = args.model_dir or args.model
    given = (path, args.gin_file, args.gin_bindings, args.gin_search_paths)
    trainer, model, params = loading.load(*given, trust=args.trust_config, placed=serving_mesh.placed).run
    takes, sampling, batching = config.build(ServerConfig), config.build(Sampling), config.build(EngineConfig)
    data, talk = trainer.dataset, chat.of_served(trainer.dataset)
    config.check_used()
    vocabulary, lengths = data.get_vocabulary(), (data.length, data.encoder_length)
    engine = Engine(model, params, vocabulary, lengths[0], batching, lengths[1])
    if takes.warm_up:
        with StatusLine() as line:
            engine.warm_up(lambda done, count: line.show("compiling", f"{done} of {count} programs"))
    name = args.name or os.path.basename(os.path.normpath(path)).removesuffix(".gguf")
    return Served(engine.start(), vocabulary, talk, *lengths, name, sampling), takes


if __name__ == "__main__":
    sys.exit(cli.run_process(main))
