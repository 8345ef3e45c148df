"""The flags by which a verb connects to the other processes of its run."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from capibara.config.search import find_file, search_folders
from capibara.multihost import joining
from capibara.multihost.joining import Joining


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, named after the arguments of jax.distributed.initialize."""
    group = parser.add_argument_group("several hosts", "detected automatically on TPU slices, GKE, Slurm and Open MPI")
    group.add_argument("--coordinator_address", metavar="HOST:PORT", help="of process 0")
    group.add_argument("--num_processes", type=int, metavar="N", help="processes of the run, one per host")
    group.add_argument("--process_id", type=int, metavar="I", help="index of this process, from 0")
    group.add_argument(
        "--join_timeout", type=float, default=300.0, metavar="S", help="seconds to wait for all processes; default: 300"
    )


def of(args: argparse.Namespace) -> Joining:
    """Reads the flags."""
    return Joining(
        coordinator_address=args.coordinator_address,
        num_processes=args.num_processes,
        process_id=args.process_id,
        timeout_s=args.join_timeout,
    )


def command_facts(args: argparse.Namespace) -> dict[str, str]:
    """The command line as facts that must be the same in all processes of a verb."""
    flags = ("coordinator_address", "num_processes", "process_id", "join_timeout")
    folders = search_folders(args.gin_search_paths)
    files = {name: find_file(name, folders).read_text(encoding="utf-8", errors="replace") for name in args.gin_file}
    return {
        "command": "\n".join(f"--{name}={value}" for name, value in vars(args).items() if name not in flags),
        **{f"Gin file {name}": text for name, text in files.items()},
    }


def join_all(args: argparse.Namespace, tell: Callable[[str], None] = print) -> None:
    """Connects the processes as a verb's command line says; it must be the same in all of them."""
    joining.join(of(args), command_facts(args), emulated=args.emulate is not None, tell=tell)
