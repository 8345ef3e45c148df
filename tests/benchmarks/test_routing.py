"""benchmarks/routing.py measures routers as it says, from logs to the picture."""

from __future__ import annotations

import io
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "routing.py"
DOMAINS = ("python", "sql", "javascript", "debug", "ml", "api")


@pytest.fixture(scope="module")
def routing(load_benchmark):
    """The benchmark as a module."""
    return load_benchmark("routing")


def counts(routing, experts_of, tokens=8):
    """Of a text of each domain: one layer, whose tokens go to these experts in equal parts."""
    top = np.zeros((6, 1, 12))
    for number, experts in enumerate(experts_of):
        top[number, 0, list(experts)] = tokens / len(experts)
    return routing.Counts(np.arange(6), top, 2 * top)


def test_a_router_by_domain_is_right_and_all_experts_are_used(routing):
    found = counts(routing, [(2 * number, 2 * number + 1) for number in range(6)])
    assert routing.accuracies(found, routing.hinted(12, 1)) == {"tokens": [1.0] * 6, "texts": [1.0] * 6}
    used = routing.utilisation(found)
    assert used["load"] == pytest.approx([1.0] * 12) and used["entropy"] == pytest.approx(1.0)
    assert used["information_bits"] == pytest.approx(np.log2(6))


def test_a_router_that_prefers_no_expert_tells_nothing(routing):
    found = counts(routing, [range(12)] * 6, tokens=12)
    assert routing.accuracies(found, routing.hinted(12, 1))["tokens"] == pytest.approx([1 / 6] * 6)
    assert routing.utilisation(found)["information_bits"] == pytest.approx(0)


def test_experts_without_a_domain_get_the_one_that_suits_them(routing):
    order = [5, 0, 1, 4, 3, 2]
    found = counts(routing, [(order[number], 6 + order[number]) for number in range(6)])
    shares = found.by_domain(found.top)
    for of_experts in (routing.best(shares), shares.argmax(1)):
        assert routing.accuracies(found, of_experts)["tokens"] == [1.0] * 6
    assert np.mean(routing.accuracies(found, routing.hinted(12, 1))["tokens"]) < 0.5


def test_the_best_assignment_leaves_no_domain_without_experts(routing):
    shares = np.random.default_rng(0).dirichlet(np.ones(12), (3, 6))
    shares[:, 0] = 1 / 12  # for majority this domain has hardly an expert
    assert all(np.bincount(layer, minlength=6).tolist() == [2] * 6 for layer in routing.best(shares))


def run_of(accuracies, *, texts=(1,) * 6):
    """What is measured of a run, of which only these accuracies of tokens differ from others."""
    split = {"accuracy": {}, "counts_by": "majority", "texts": list(texts)}
    for name in ("hints", "best assignment", "majority"):
        split["accuracy"][name] = {"tokens": list(accuracies), "texts": [0.5] * 6}
    used = dict.fromkeys(("load_max", "load_min", "entropy", "entropy_within_domain", "information_bits"), 1.0)
    other = {"loss": {"validation": 1.0, "test": 2.0}, "train_s": 1.0, "utilisation": used}
    return {**split, **other, "validation": split, "share_by_domain": np.full((6, 12), 1 / 12)}


def test_a_domain_without_texts_is_not_in_the_mean(routing):
    one = run_of([0.2, 0.4, 0.6, 0.0, 0.0, 0.0], texts=(1, 1, 1, 0, 0, 0))
    assert routing.overall(one) == pytest.approx(0.4) and routing.overall(one, "texts") == 0.5


@pytest.mark.parametrize(
    ("hybrid", "learned", "expected"),
    [
        ([0.4], [0.2], "hybrid 40.0%, learned alone 20.0%, chance 16.7%; better in 6 of 6 domains: passed"),
        (
            [0.4, 0.5],
            [0.2, 0.1],
            "hybrid 45.0% (40.0%..50.0%), learned alone 15.0% (10.0%..20.0%), chance 16.7%; better in 6 of 6 domains: passed",
        ),
        ([0.2], [0.2], "hybrid 20.0%, learned alone 20.0%, chance 16.7%; better in 0 of 6 domains: FAILED"),
    ],
)
def test_the_last_line_has_the_means_and_their_spread_over_seeds(routing, hybrid, learned, expected):
    console = routing.Console(width=110, file=io.StringIO())
    runs = [[run_of([accuracy] * 6) for accuracy in of_router] for of_router in (hybrid, learned)]
    passed = routing.show(dict(zip(routing.ROUTERS, runs)), console)
    printed = console.file.getvalue()
    assert printed.splitlines()[-1] == expected and passed == expected.endswith("passed")
    (row,) = (line for line in printed.splitlines() if "accuracy of tokens, validation" in line)
    assert [f"{np.mean(of_router):.3f}" in row for of_router in (hybrid, learned)] == [True, True]


def test_the_better_assignment_counts_on_each_split(routing):
    found = counts(routing, [(2 * number, 2 * number + 1) for number in range(6)])
    assignments = {"best assignment": routing.hinted(12, 1)[:, ::-1], "majority": routing.hinted(12, 1)}
    one = routing.result(found, assignments)
    assert (one["counts_by"], routing.overall(one), one["texts"]) == ("majority", 1.0, [1] * 6)
    assert routing.result(found, {**assignments, "hints": assignments["best assignment"]})["counts_by"] == "hints"


CODES = {
    "python": "def area_{0}(width):\n    return width * {0}\n\narea_{0}({0})",
    "sql": "SELECT name_{0}, sum(price) FROM orders_{0} WHERE price > {0} GROUP BY name_{0}",
    "javascript": "const total{0} = [1, {0}].map((x) => x * {0});\ntotal{0}.length",
    "ml": "import numpy as np\nweights_{0} = np.ones(({0}, 3))\nweights_{0}.mean()",
    "api": "from webob import Request\nrequest_{0} = Request.blank('/page/{0}')\nrequest_{0}.path",
    "debug": "values_{0} = list(range({0}))\nvalues_{0}[{0} + 1]",
}


@pytest.fixture
def logs(tmp_path):
    """A log of each domain, of 30 sessions."""
    folder = tmp_path / "logs"
    folder.mkdir()
    for domain, code in CODES.items():
        error = (
            {"name": "IndexError", "value": "list index out of range", "traceback": ""} if domain == "debug" else None
        )
        language = domain if domain in ("sql", "javascript") else "python"
        about = {"results": [{"text": "1"}], "logs": {"stdout": [], "stderr": []}, "error": error, "language": language}
        lines = [
            json.dumps({"code": code.format(n), **about, "session_id": f"{domain}{n}", "timestamp": 1_767_225_600 + n})
            for n in range(30)
        ]
        (folder / f"{domain}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_both_routers_are_trained_on_logs_and_measured_on_other_sources(logs, tmp_path):
    sizes = "--steps=4 --embed_dim=16 --layers=1 --experts=6 --length=64 --rows=8 --per_domain=20 --sample=4".split()
    made = {name: tmp_path / f"made.{name}" for name in ("folder", "json", "png")}
    command = [sys.executable, str(SCRIPT), "--logs", str(logs), *sizes]
    command += [f"--{name}={path}" for name, path in zip(("folder", "json", "picture"), made.values())]
    one_device = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, env=one_device
    )
    assert done.returncode in (0, 1) and "better in" in done.stdout, done.stdout  # whether so few steps pass is chance
    found = json.loads(made["json"].read_text())
    assert found["passed"] == (done.returncode == 0)
    for router in ("hybrid", "learned alone"):
        (of_seed,) = found[router]
        assert of_seed["loss"]["test"] > 0 and sum(of_seed["texts"]) > 10 and min(of_seed["texts"]) > 0
        shares = np.array(of_seed["share_by_domain"])
        assert shares.shape == (6, 6) and np.allclose(shares.sum(1), 1)
        assert np.mean(of_seed["utilisation"]["load"]) == pytest.approx(1)
        held_out = of_seed["validation"]
        assert held_out["accuracy"].keys() == of_seed["accuracy"].keys() and held_out["texts"] != of_seed["texts"]
        assert sum(held_out["texts"]) > 0 and 0 <= max(held_out["accuracy"][held_out["counts_by"]]["tokens"]) <= 1
    assert "hints" in found["hybrid"][0]["accuracy"] and "hints" not in found["learned alone"][0]["accuracy"]
    assert made["png"].read_bytes().startswith(b"\x89PNG")
    of_split = {}
    for name in ("train", "validation", "test"):
        with open(made["folder"] / "set" / f"{name}.jsonl", encoding="utf-8") as file:
            of_split[name] = {json.loads(line)["source"] for line in file}
    assert sum(map(len, of_split.values())) == len(set.union(*of_split.values()))
