"""Shows runs in a browser, live: `python -m capibara.dashboard runs/`."""

from __future__ import annotations

from collections.abc import Sequence

from capibara.cli.arguments import flags
from capibara.core.types import UserError

_DESCRIPTION = """Show runs in a browser, live: curves, samples, checkpoints, lineage, the plan beside what is measured, and alerts.

RUNS are run folders or folders of run folders, here or in a bucket; new runs appear by themselves.

examples:
  python -m capibara.dashboard runs
  python -m capibara.dashboard runs/quickstart gs://my-bucket/runs --port=8081
  CAPIBARA_DASHBOARD_TOKEN=$(openssl rand -hex 32) python -m capibara.dashboard runs --host=0.0.0.0
  python -m capibara.dashboard runs --webhook_file=webhooks.txt --gin.DashboardConfig.low_goodput=0.8

Only this machine can open it, unless --host names another address: then a token is needed, of CAPIBARA_DASHBOARD_TOKEN,
--token_file, or a new one that is printed once in the address. Webhooks receive alerts as JSON.
exit codes: 0 stopped by a signal; 2 invalid input"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and serves until a signal arrives; returns the exit code."""
    parser = flags.ArgumentParser("capibara dashboard", _DESCRIPTION)
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run folders, or folders of run folders")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine only")
    parser.add_argument("--port", type=int, default=8080, help="0: any free one; default: 8080")
    parser.add_argument("--next_ports", action="store_true", help="try the following ports if this one is in use")
    parser.add_argument("--token_file", metavar="FILE", help="a file that holds the token")
    parser.add_argument("--webhook", action="append", default=[], metavar="URL", help="send alerts there; repeatable")
    parser.add_argument("--webhook_file", metavar="FILE", help="the same, one URL a line: nobody else reads them")
    parser.add_argument("--allowed_host", action="append", default=[], metavar="NAME", help="of a proxy; repeatable")
    parser.add_argument("--parent", type=int, metavar="PID", help="end with this process, which started this one")
    args = flags.parse_arguments(parser, argv)
    if not 0 <= args.port < 65536:
        raise UserError(f"--port={args.port} must be from 0 to 65535 (0: any free one): try 8080")
    return dashboard(args)


def dashboard(args: flags.Arguments) -> int:
    """Serves until a signal arrives; returns the exit code."""
    from capibara.core import extras

    for package in ("starlette", "uvicorn", "pyarrow", "regex"):
        extras.require(package, extra="dashboard", why="capibara dashboard")
    from capibara import config
    from capibara.cli.composition import run_facts
    from capibara.monitoring.dashboard import server
    from capibara.monitoring.dashboard.settings import DashboardConfig

    config.parse(args.gin_file, args.gin_bindings, args.gin_search_paths)
    options = server.Options(
        roots=tuple(args.runs),
        host=args.host,
        port=args.port,
        next_ports=args.next_ports,
        token_file=args.token_file,
        webhook_file=args.webhook_file,
        webhooks=tuple(args.webhook),
        allowed_hosts=tuple(args.allowed_host),
        parent=args.parent,
    )
    built = config.build(DashboardConfig)
    config.check_used()
    return server.run(options, built, run_facts.questions(options.roots))
