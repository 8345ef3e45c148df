"""pass@k: the estimator of Chen et al., programs made of HumanEval's records, answers of chat models."""

from __future__ import annotations

import itertools
import statistics

import pytest

from capibara.core.types import UserError
from capibara.evaluation.metrics import computed
from capibara.evaluation.programs import PassAtK, pass_at_k, program
from capibara.evaluation.tasks import EvalTask
from capibara.inference.sampling.sampling import Sampling
from capibara.sandbox.sandbox import Sandbox

ADD = {
    "prompt": "def add(a, b):\n",
    "test": "def check(f):\n    assert f(1, 2) == 3\n",
    "entry_point": "add",
}


def test_the_estimate_is_the_mean_over_all_choices_of_k():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n and k <= n:
            passed = [i < c for i in range(n)]
            want = statistics.fmean(any(drawn) for drawn in itertools.combinations(passed, k))
            assert pass_at_k(n, c, k) == pytest.approx(want)
    with pytest.raises(UserError, match=r"k \(3\) must be from 1 to the samples of a problem \(2\)"):
        pass_at_k(2, 1, 3)


def test_programs_are_run_with_their_tests():
    metric = PassAtK(k=(1, 2), sandbox=Sandbox(seconds=3))
    good, bad = "    return a + b", "    return a - b"
    found = computed(metric, [ADD, ADD, ADD], [[good, bad], [bad, bad], [good, good]])[0]
    assert found["pass@1"].value == pytest.approx(0.5) and found["pass@2"].value == pytest.approx(2 / 3)
    assert found["pass@1"].standard_error == pytest.approx(0.5 / 3**0.5)
    assert PassAtK(sandbox=Sandbox(seconds=3))([ADD], [good]) == {"pass@1": [1.0]}


def test_tests_that_must_share_the_programs_process_do_so_on_demand(caplog):
    task = {"prompt": "", "test": "import pathlib\nassert f(pathlib.Path('/a')) == pathlib.Path('/a/b')"}
    good = "def f(x):\n    return x / 'b'"
    metric = PassAtK(sandbox=Sandbox(seconds=3))
    assert metric([task], [good]) == {"pass@1": [0.0]}
    assert "the tests hand over PosixPath" in caplog.text and "PassAtK.separate = False" in caplog.text
    together = PassAtK(sandbox=Sandbox(seconds=3), separate=False)
    assert together([task, task], [good, "def f(x): pass"]) == {"pass@1": [1.0, 0.0]}
    assert "a program can forge" in caplog.text
    assert together.about()["programs"] == metric.about()["programs"] | {"separate": False}
    assert metric.about()["programs"]["holder"] in ("bubblewrap", "namespaces", "limits")


def test_code_in_a_fence_is_the_program():
    whole = "Here it is:\n```python\nimport math\n\ndef add(a, b):\n    return a + b\n```\nIt adds."
    assert program(ADD, whole) == "import math\n\ndef add(a, b):\n    return a + b\n\n" + ADD["test"] + "\ncheck(add)\n"
    body = program(ADD, "```\n    return a + b\n```")
    assert body.startswith("def add(a, b):\n    return a + b\n") and body.endswith("check(add)\n")
    cut = program(ADD, "    return a + b\n```\nIt adds:\n```python\nadd(1, 2)\n```\n")
    assert cut == "def add(a, b):\n    return a + b\n\n" + ADD["test"] + "\ncheck(add)\n"
    assert program({"test": "t"}, "So:\n```\nx = 1\n```") == "x = 1\n\nt\n"
    assert program({"test": ["assert x", "assert y"], "setup": "z = 1"}, "x = y = z") == (
        "z = 1\nx = y = z\nassert x\nassert y\n"
    )


def test_mistakes_are_said_before_anything_is_generated():
    more = {"files": ("x.jsonl",), "sampling": Sampling(temperature=0.5)}
    with pytest.raises(UserError, match="PassAtK.k has 10, must be at most EvalTask.num_samples .5."):
        EvalTask(metrics=(PassAtK(k=(1, 10)),), num_samples=5, **more)
    with pytest.raises(UserError, match="PassAtK.k is"):
        PassAtK(k=())
    with pytest.raises(UserError, match="needs the key 'test'"):
        PassAtK()(["a text"], ["x"])
    with pytest.raises(UserError, match="the target's 'entry_point' must be a text, not 5"):
        PassAtK().check_target({"test": "x", "entry_point": 5})
