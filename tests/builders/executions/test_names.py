"""The global names of Python code, and the modules that earlier cells of a session have imported for it."""

from __future__ import annotations

import pytest

from capibara.builders.executions import names
from capibara.builders.executions.names import EarlierImports


def found_in(*cells: str | tuple[str, str]) -> tuple[str, ...]:
    """The earlier imports of the last cell; a pair is a cell and its error."""
    earlier = EarlierImports(sessions=2)
    found = [earlier.add("s", *((cell, None) if isinstance(cell, str) else cell)) for cell in cells]
    return found[-1]


def test_the_names_of_code_have_their_modules():
    code = "import os.path, numpy as np\nfrom scipy.linalg import inv as inverse\ndef f(x):\n    import json\n    return y + x"
    found = names.of_code(f"{code}\nif f:\n    from webob import Request\nfrom math import *\nfrom . import near")
    assert found is not None and found.imported == {
        "os": "os",
        "np": "numpy",
        "inverse": "scipy",
        "Request": "webob",
    }
    assert found.used == {"f", "y"} and {"np", "f", "near"} < found.bound and "x" not in found.bound


@pytest.mark.parametrize(
    "code",
    [
        "import one as x\nimport two as x",
        "if y:\n    import one as x\nimport two as x",
        "if y:\n    import one as x\nelse:\n    import two as x",
        "import one as x, two as x",
        "import one as x\nfor y in z:\n    from two import x",
    ],
)
def test_of_imports_of_one_name_the_last_counts(code):
    assert names.of_code(code).imported == {"x": "two"}


@pytest.mark.parametrize(
    "code", ["x = (", "x = '\0'", "(" * 5000, "-" * 100_000 + "1", "a" + ".b" * 100_000, "[" * 90 + "]" * 90 + "]"]
)
def test_code_that_does_not_parse_has_no_names(code):
    assert names.of_code(code) is None


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["import numpy as np", "x = 1", "np.zeros(3)"], ("numpy",)),
        (["from webob import Request", "def f():\n    return Request.blank('/')"], ("webob",)),
        (["import numpy as np\nimport requests, webob", "np.get(requests)"], ("numpy", "requests")),
        (["%matplotlib inline\nif 1:\n  !pip install numpy\nimport numpy as np", "np.pi"], ("numpy",)),
        (["import numpy as np\nnp.foo", "np.pi"], ("numpy",)),
        ([("import numpy as np\nnp.foo", "AttributeError"), "np.pi"], ("numpy",)),
        ([("import numpy as np", "ModuleNotFoundError"), "np.pi"], ()),
        (["import numpy as np", "total = 1\ntotal"], ()),  # it does not use it
        (["import numpy as np", "import numpy as np\nnp.pi"], ()),  # its own import counts as such
        (["import numpy as np", "np = 3", "np + 1"], ()),
        (["import numpy as np", ("np = 1 / 0", "ZeroDivisionError"), "np.pi"], ("numpy",)),
        (["import numpy as np", "import mynumpy as np", "np.pi"], ("mynumpy",)),
        (["import numpy as np", "def f(np):\n    return np"], ()),  # a parameter
        (["np.pi", "import numpy as np"], ()),
        (["import numpy as np", "np.("], ()),
    ],
)
def test_a_cell_uses_imports_of_earlier_ones(cells, expected):
    assert found_in(*cells) == expected


def test_sessions_are_apart_and_the_oldest_is_forgotten():
    earlier = EarlierImports(sessions=2)
    for session in ("a", "b"):
        earlier.add(session, f"import {session}", None)
    assert earlier.add("b", "a, b", None) == ("b",) and earlier.add("a", "a, b", None) == ("a",)
    earlier.add("c", "import c", None)
    assert earlier.add("a", "a", None) == ("a",) and earlier.add("b", "b", None) == ()
