"""How many questions about installed packages a model answers alone, and with chunks that an index has retrieved.

    python benchmarks/retrieved_answers.py --model=SmolLM2-135M-Instruct.gguf --embedder=MODEL [--folder=runs/retrieved_answers]
        [--questions=60] [--k=1,2,4] [--json=OUT]

The documents are the names, summaries and authors of the installed packages, from their metadata. The questions ask who the author of
a package is, and "Name: PACKAGE" is searched for; of four authors the likeliest answer counts. Exit code 1 unless every --k beats
the model alone.
"""

from __future__ import annotations

import argparse
import email
import json
import pathlib
import random
import sys
import sysconfig

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout's package, installed or not

import capibara as cb  # noqa: E402

ALONE = "Question: {question}\nAnswer:"
WITH = "{context}\n\nQuestion: {question}\nAnswer:"


def write_files(folder: pathlib.Path, count: int) -> None:
    """documents.jsonl and questions.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, documents, authors = random.Random(0), [], {}
    for path in sorted(pathlib.Path(sysconfig.get_paths()["purelib"]).glob("*.dist-info/METADATA")):
        about = email.message_from_string(path.read_text("utf-8", "replace"))
        author = about["Author"] or (about["Author-email"] or "").split("<")[0].strip().strip('"')
        if author and len(author) < 40 and about["Summary"]:
            documents.append({"text": f"Name: {about['Name']}\nSummary: {about['Summary']}\nAuthor: {author}"})
            authors[about["Name"]] = author
    names = rng.sample(sorted(authors), min(count, len(authors)))
    everyone = sorted({*authors.values()})
    with open(folder / "questions.jsonl", "w") as file:
        for name in names:
            others = rng.sample([author for author in everyone if author != authors[name]], 3)
            choices = rng.sample([authors[name], *others], 4)
            question = f"Who is the author of the Python package {name}?"
            line = {"question": question, "search": f"Name: {name}", "choices": choices, "answer": authors[name]}
            file.write(json.dumps(line) + "\n")
    (folder / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--embedder", required=True)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/retrieved_answers"))
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--k", default="1,2,4")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    folder = args.folder
    write_files(folder, args.questions)
    settings = cb.IndexPreparation(chunk_tokens=128, ms=100.0)
    cb.prepare_index(str(folder / "documents.jsonl"), str(folder / "index"), args.embedder, settings)
    fields = {"files": (str(folder / "questions.jsonl"),), "choices": "choices", "target": "answer"}
    tasks = {"alone": cb.EvalTask(**fields, prompt=ALONE)}
    for k in map(int, args.k.split(",")):
        retrieval = cb.Retrieval(index=str(folder / "index"), k=k, query="search")
        tasks[f"with_{k}"] = cb.EvalTask(**fields, prompt=WITH, retrieval=retrieval)
    result = cb.evaluate(args.model, tasks)
    index, lines = cb.index(folder / "index"), open(folder / "questions.jsonl").readlines()
    questions = [json.loads(line) for line in lines]
    hits = index.search_many([question["search"] for question in questions], 8)
    accuracies = {}
    for name, task in result["tasks"].items():
        accuracy = accuracies[name] = task["metrics"]["accuracy"]
        k = task.get("k", 0)
        gold = [any(q["answer"] in hit.text for hit in near[:k]) for q, near in zip(questions, hits)]
        print(
            f"{name:<10} accuracy {accuracy['value']:.3f} +- {accuracy['standard_error']:.3f}, author in the chunks "
            f"{sum(gold) / len(gold):.3f}"
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    alone = accuracies.pop("alone")["value"]
    return int(any(accuracy["value"] <= alone for accuracy in accuracies.values()))


if __name__ == "__main__":
    sys.exit(main())
