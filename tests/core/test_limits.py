"""Bounds of files that may come from anyone."""

from __future__ import annotations

import pytest

from capibara.core import limits
from capibara.core.types import UserError


@pytest.mark.parametrize("before", [b"", b"a\n", b"a\nb\n"])
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_each_line_is_bounded_wherever_it_is_and_however_it_is_read(before, end, cut):
    for size in (50, 51):
        content = before + b"x" * size + end
        blocks = [content[at : at + cut] for at in range(0, len(content), cut)]
        if size == 50:
            assert [line for _, line in limits.lines_of(blocks, "f", 50)][-1] == b"x" * 50
            continue
        with pytest.raises(
            UserError, match=f"^f:{before.count(b'a') + before.count(b'b') + 1} is longer than 50 bytes"
        ):
            list(limits.lines_of(blocks, "f", 50))


def test_a_file_of_size_0_is_empty(tmp_path):
    (tmp_path / "empty").touch()
    assert limits.check_file(tmp_path / "empty") == 0
    with pytest.raises(UserError, match="^/proc/self/status has more bytes than its size of 0 says: put a copy in its"):
        limits.check_file("/proc/self/status")
