"""Patterns of streaming heads: from gates, and to and from files."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from capibara.cli import prepare
from capibara.core.types import UserError
from capibara.models import head_patterns
from capibara.models.api import StreamingHeads

GATES = np.array([[0.9, 0.2, 0.2], [np.nan, np.nan, np.nan], [0.2, 0.7, 0.0]], np.float32)


@pytest.mark.parametrize(
    ("how", "heads"),
    [
        (dict(share=1.0), ((), (), ())),
        (dict(share=0.0), ((0, 1, 2), (), (0, 1, 2))),
        (dict(share=0.5), ((2,), (), (0, 2))),  # of equal gates the first
        (dict(threshold=0.2), ((), (), (2,))),
        (dict(threshold=0.5), ((1, 2), (), (0, 2))),
    ],
)
def test_the_smallest_gates_stream(how, heads):
    assert head_patterns.streaming(GATES, **{"share": None, "threshold": None} | how) == heads


def test_a_pattern_is_read_as_it_was_written(tmp_path):
    pattern = StreamingHeads(heads=((1, 2), ()), sink_tokens=7, recent_window=9)
    path = tmp_path / head_patterns.FILE
    path.write_text(head_patterns.written(pattern, GATES))
    assert head_patterns.read_streaming_heads(str(path)) == pattern
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["gates"][1] == [None, None, None]


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(UserError, match="is a pipe, must be a regular file"):
        head_patterns.read_streaming_heads(str(tmp_path / "pipe.json"))


def test_layers_without_gates_have_no_place_in_the_form_of_the_duo_attention_project():
    pattern = StreamingHeads(heads=((1, 2), (), (0,)))
    with pytest.raises(UserError, match="layer 1 has a window or no attention, and no gates, .*: leave it out"):
        head_patterns.written_gates(pattern, GATES)
    assert head_patterns.written_gates(pattern, GATES[::2])["full_attention_heads.tsv"].startswith("0.9000\t0.2000")


@pytest.mark.parametrize("text", ["", "nan\t0.5\n", "a\tb\n", "0.5\t0.5\n0.5\n"])
def test_gates_that_are_no_numbers_are_refused(tmp_path, text):
    (tmp_path / "full_attention_heads.tsv").write_text(text)
    (tmp_path / "config.json").write_text('{"sink_size": 128, "recent_size": 256}')
    with pytest.raises(UserError, match="must have finite gates|full_attention_heads.tsv cannot be read"):
        head_patterns.read_gates(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"heads":' * 100_000, "is nested"),
        ("[]", "is no JSON object"),
        ("{}", "must have heads, sink_tokens and recent_window"),
        ('{"heads": [[0]], "sink_tokens": 1}', "must have heads, sink_tokens and recent_window"),
        ('{"heads": [["0"]], "sink_tokens": 1, "recent_window": 2}', "must have lists of heads' numbers"),
        ('{"heads": [0], "sink_tokens": 1, "recent_window": 2}', "must have lists of heads' numbers"),
        ('{"heads": [[1, 0]], "sink_tokens": 1, "recent_window": 2}', r"heads\[0\] is \(1, 0\), must be in order"),
        ('{"heads": [[0]], "sink_tokens": 1, "recent_window": 0}', "recent_window is 0"),
    ],
)
def test_a_file_that_is_no_pattern_is_refused(tmp_path, text, message):
    path = tmp_path / "pattern.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        head_patterns.read_streaming_heads(str(path))


def test_gates_of_the_duo_attention_project_become_a_pattern(tmp_path, capsys):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "full_attention_heads.tsv").write_text("1.0\t0.1\n0.3\t1.2\n")
    (folder / "config.json").write_text('{"sink_size": 128, "recent_size": 256, "lr": 0.02}')
    out = tmp_path / "pattern.json"
    argv = ["streaming_heads", f"--gates={folder}", "--threshold=0.5", "--sink_tokens=64", f"--output={out}"]
    assert prepare.main(argv) == 0
    want = StreamingHeads(heads=((1,), (0,)), sink_tokens=64, recent_window=256)
    assert head_patterns.read_streaming_heads(str(out)) == want
    assert "2 of 4 heads stream (64 sink tokens, 256 recent ones)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "exactly one of --run and --gates is needed"),
        (["--run=x", "--gates=y"], "exactly one of --run and --gates is needed"),
        (["--gates=x"], "--output is missing"),
        (["--gates={folder}", "--output={folder}/x", "--share=0.5"], "full_attention_heads.tsv cannot be read"),
        (["--gates=missing", "--output={folder}/x", "--share=0.5"], "missing/config.json does not exist: name a"),
    ],
)
def test_bad_flags_are_refused(tmp_path, argv, message):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=message):
        prepare.main(["streaming_heads", *(item.format(folder=tmp_path) for item in argv)])


@pytest.mark.parametrize("how", [{}, dict(share=0.5, threshold=0.5), dict(share=1.5), dict(threshold=-0.1)], ids=str)
def test_shares_and_thresholds_are_checked(how):
    with pytest.raises(UserError, match="--share" if "threshold" not in how or "share" in how else "--threshold"):
        head_patterns.streaming(GATES, **{"share": None, "threshold": None} | how)
