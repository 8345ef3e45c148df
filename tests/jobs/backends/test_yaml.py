"""Texts of manifests are texts for every reader: PyYAML (YAML 1.1), the core schema of YAML 1.2, and Kubernetes' (Go).

What Go takes for something else was read from its resolver (go-yaml 2, as sigs.k8s.io/yaml 1.4 has it) and tried with kubectl 1.32.
They differ from PyYAML in: 1e5, 1e-3, 1.5e3, .5e1 (numbers in Go, texts in PyYAML), 0o17 (a number in Go), y and n (truth values
in go-yaml 2), 190:20:30 (a number in PyYAML, a text in Go), = (an error in PyYAML's loader).
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess

import pytest
import yaml

from capibara.jobs.backends.backend import Form, Rendering

PLAIN = """
y Y n N yes Yes YES no on ON off Off true True TRUE false null Null NULL ~ nil NaN .nan .NaN .NAN nan .inf .Inf -.inf +.INF inf
Infinity -Infinity = << ! & * | > % @ ` ? - : , [ ] { } # ' " - - --- ... 0 1 -1 +1 007 010 0123 08 09 0o17 0O17 -0o7 0x1F 0X1f -0x1 0b101 0B1 1_000 _1
1_0.5 1e3 1E3 1e-3 1e+3 1.5e3 1.e3 .5 .5e1 5. 1.0 +1.5 -2e5 1e 1e+ 12:30 12:30:45 190:20:30 1:60 -1:30 12:30:45.6 2001-12-14 2001-1-1
2001-12-14t21:59:43.10-05:00 2001-12-14T21:59:43Z 20011214 1.2.3 10.0.0.1 ::1 8x8 2x2x1 v5e-64 7ec82f9d246d84a3 1e10 12e34 123e4567
0e0 00e1 0xG 0o8 0b2 9223372036854775808 1e400 -0 -0.0 0. . .. ._ __ +.5 +. -. e1 E5 a b true1 yesno key:value key: :key a:b #a a#b
!!str !tag &anchor *alias %d @home `cmd` ${VALUE} {{x}} $(x) ' ''
""".split()
ODD = [
    "", " ", "  a", "a  ", "a b", "a: b", "a #b", "- a", "? a", "a\nb", "a\n", "\na", "a\tb", "\t", "a\r\nb", "\u00e9", "\u2028", "\x85",
    "\ufeff", "\U0001f600", "пароль", "密码", "\x7f", "\x1b[0m", "a\\b", "\\n", "it's", '"', "2001-12-14 21:59:43.10 -5", "2001-12-14 ",
    "a" * 5000,
]  # fmt: skip
_PIECES = [
    "0",
    "1",
    "9",
    "_",
    ".",
    "e",
    "E",
    "+",
    "-",
    "x",
    "o",
    "b",
    ":",
    "y",
    "n",
    " ",
    "inf",
    "nan",
    "T",
    "Z",
    "a",
    "f",
    "#",
    "'",
    "~",
    "=",
    "é",
]
# YAML 1.2's core schema, section 10.3.2.
_CORE = re.compile(
    r"null|Null|NULL|~||true|True|TRUE|false|False|FALSE|[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
    r"|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN"
)
# go-yaml 2's resolve.go: words, then numbers without their underscores.
_GO_WORDS = re.compile(r"y|Y|yes|Yes|YES|on|On|ON|n|N|no|No|NO|off|Off|OFF|<<|\.nan|\.NaN|\.NAN|[-+]?\.(inf|Inf|INF)")
_GO_NUMBER = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?0[xX][0-9a-fA-F]+|[-+]?0[oO]?[0-7]+|[-+]?0[bB][01]+"
)
_GO_TIME = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?")


def texts(count, seed=0):
    rng = random.Random(seed)
    made = ["".join(rng.choices(_PIECES, k=rng.randint(1, 7))) for _ in range(count)]
    return [*PLAIN, *ODD, *made]


def rendered(values):
    document = {"env": [{"name": "A", "value": value} for value in values], **{value: "key" for value in values[:200]}}
    return document, Rendering(form=Form.YAML, documents=[document]).text()


def resolved_by_go(plain):
    number = plain.replace("_", "")
    is_number = plain[:1] in "+-.0123456789" and plain and _GO_NUMBER.fullmatch(number)
    return bool(_GO_WORDS.fullmatch(plain) or is_number or _GO_TIME.fullmatch(plain))


def test_a_text_is_a_text_for_every_reader():
    values = [value for value in texts(3000) if "\x7f" not in value]
    document, text = rendered(values)
    assert yaml.safe_load(text) == document  # YAML 1.1
    scalars = [token for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken) and token.plain]
    assert len(scalars) > 1000
    for token in scalars:
        assert not _CORE.fullmatch(token.value) and not resolved_by_go(token.value), token.value


def test_numbers_and_truth_values_stay():
    document = {"a": 1, "b": [0, -5, 10**15], "c": 0.001, "d": 1e20, "e": True, "f": None, "g": 1.5, "h": -1e-7}
    text = Rendering(form=Form.YAML, documents=[document]).text()
    assert yaml.safe_load(text) == document
    for token in (one for one in yaml.scan(text) if isinstance(one, yaml.ScalarToken) and one.value not in document):
        assert token.plain and _CORE.fullmatch(token.value), token.value


@pytest.mark.heavy
@pytest.mark.skipif(not (os.environ.get("KUBECTL") or shutil.which("kubectl")), reason="needs kubectl (KUBECTL)")
def test_kubectl_reads_the_same(tmp_path):
    values = [value for seed in range(3) for value in texts(3000, seed)]
    pod = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "a"},
        "data": {f"k{number}": value for number, value in enumerate(values)},
    }
    (tmp_path / "a.yaml").write_text(Rendering(form=Form.YAML, documents=[pod]).text())
    kubectl = os.environ.get("KUBECTL") or str(shutil.which("kubectl"))
    argv = [kubectl, "annotate", "--local", "-f", str(tmp_path / "a.yaml"), "a=b", "-o", "json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[:1000]
    assert json.loads(done.stdout)["data"] == pod["data"]
