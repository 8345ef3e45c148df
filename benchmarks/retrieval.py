"""The smallest index of 100,000 chunks that finds 95% of what an exact search finds, and all settings that were tried.

    python benchmarks/retrieval.py --model=SmolLM2-135M-Instruct [--folder=runs/retrieval] [--layers=1] [--json=OUT] [--picture=OUT]

The documents are the metadata of the installed packages, the docstrings of the standard library, and of the packages in a
random order until there are enough chunks of 64 tokens. They are embedded by the model's first layers, so that two cores need
minutes; --layers=0 takes all. Chunks and embeddings stay in --folder for the next run. Queries are spans of a third of a chunk:
half of them choose the settings, the recall of the table is that of the other half. Exit code 1 if the index that is chosen has a
recall below 0.95 or more than an eighth of the bytes of the vectors in float32.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import itertools
import json
import pathlib
import random
import sys
import sysconfig
import warnings
from collections.abc import Iterator

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout's package, installed or not

import capibara as cb  # noqa: E402
from capibara.builders.files.problems import Problems  # noqa: E402
from capibara.builders.preparation import documents  # noqa: E402
from capibara.cli.composition import retrieving  # noqa: E402
from capibara.retrieval import build, picture  # noqa: E402
from capibara.retrieval.chunking import chunks_of, spans  # noqa: E402
from capibara.retrieval.tuning import Tuned, Tuner  # noqa: E402

SETTINGS = cb.IndexPreparation(chunk_tokens=64, overlap=8, queries=2000, ms=100.0)
RECALL, SHARE = 0.95, 1 / 8
PACKAGES, SHORTEST = 5000, 40  # modules of packages that are read at most; characters of a docstring


def docstrings(root: pathlib.Path, left_out: set[str]) -> Iterator[dict[str, str]]:
    """A document for each module: the names of what it defines, with their docstrings."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if left_out & {*parts}:
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        module = ".".join(parts)[:-3].removesuffix(".__init__")
        if texts := [*described(tree, module)]:
            yield {"source": module, "text": "\n".join(texts)}


def described(node: ast.AST, name: str) -> Iterator[str]:
    text = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else None
    if text and len(text) > SHORTEST:
        yield f"{name}\n{text}\n"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
            yield from described(child, f"{name}.{child.name}")


def write_documents(path: pathlib.Path) -> None:
    paths = sysconfig.get_paths()
    site, library = pathlib.Path(paths["purelib"]), pathlib.Path(paths["stdlib"])
    about = sorted(site.glob("*.dist-info/METADATA"))
    records = [{"source": file.parent.name, "text": file.read_text("utf-8", "replace")} for file in about]
    records += docstrings(library, {"site-packages", "test", "tests"})
    packages = [*docstrings(site, {"test", "tests"})]
    random.Random(0).shuffle(packages)
    path.write_text("".join(json.dumps(record) + "\n" for record in records + packages[:PACKAGES]))


def embed(folder: pathlib.Path, model: str, layers: int, count: int) -> None:
    """Writes chunks.jsonl, vectors.npy and queries.npy, unless they are there."""
    if (folder / "vectors.npy").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "corpus.jsonl").exists():
        write_documents(folder / "corpus.jsonl")
    if layers and not (folder / "model").exists():
        cb.merge([model], str(folder / "model"), cb.Passthrough(layers=((0, layers),)), format="hf")
    embedder = retrieving.embedder(str(folder / "model") if layers else model, SETTINGS.pooling)
    problems, fields = Problems(), dataclasses.replace(SETTINGS.fields, document_bytes=1 << 30)
    files = documents.files_of([str(folder / "corpus.jsonl")], problems)
    parts = documents.parts_of(files, fields, 32 << 20, problems)
    chunks = [*itertools.islice(chunks_of(parts, fields, SETTINGS.chunking, embedder.vocabulary, problems), count)]
    (folder / "chunks.jsonl").write_text("".join(json.dumps(dataclasses.asdict(chunk)) + "\n" for chunk in chunks))
    texts = [chunk.text for chunk in chunks]
    np.save(folder / "queries.npy", embedder(spans(texts, SETTINGS.queries, SETTINGS.seed)))
    np.save(folder / "vectors.npy", embedder(texts, lambda done: print(f"{done:,} chunks", end="\r", flush=True)))


def table(tuned: Tuned, count: int, dims: int) -> list[str]:
    rows = [f"{'settings':<28}{'effort':>7}{'bytes':>9}{'share':>8}{'recall@10':>11}{'ms':>8}"]
    for trial in sorted(tuned.trials, key=lambda trial: (-trial.bytes, trial.effort)):
        mark = "  chosen" if trial == tuned.chosen else ""
        rows.append(
            f"{trial.as_json()['factory']:<28}{trial.effort:>7}{trial.bytes / count:>9.1f}{trial.bytes / (4 * count * dims):>8.3f}"
            f"{trial.held_out_recall:>11.3f}{trial.ms:>8.2f}{mark}"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/retrieval"))
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--picture", type=pathlib.Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore", SyntaxWarning)
    embed(args.folder, args.model, args.layers, args.chunks)
    vectors, queries = np.load(args.folder / "vectors.npy"), np.load(args.folder / "queries.npy")[: SETTINGS.queries]
    center = vectors.mean(0)
    goal, show = SETTINGS.goal, lambda topic, detail: print(f"{topic}, {detail}", flush=True)
    tuned = Tuner(build.centered(vectors, center), build.centered(queries, center), goal, show).run()
    count, dims = vectors.shape
    print(f"{count:,} chunks, {dims} dimensions", *table(tuned, count, dims), sep="\n")
    if args.json:
        result = {"chunks": count, "dims": dims, "layers": args.layers, "chosen": tuned.chosen.as_json()}
        args.json.write_text(json.dumps(result | {"trials": [t.as_json() for t in tuned.trials]}, indent=1) + "\n")
    if args.picture:
        args.picture.write_bytes(picture.draw(tuned.trials, tuned.chosen, count))
    fits = tuned.chosen.bytes <= SHARE * 4 * count * dims
    return int(not (fits and tuned.chosen.held_out_recall >= RECALL))


if __name__ == "__main__":
    sys.exit(main())
