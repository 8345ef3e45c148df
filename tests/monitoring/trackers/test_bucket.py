"""Trackers of a run in a bucket, whose metrics.jsonl is rewritten from time to time."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

CHECKOUT = pathlib.Path(__file__).parents[3]
CODE = """
import sys
from capibara.monitoring.trackers import state
from capibara.monitoring.trackers.feeds import scratch_of
from capibara.storage import stores
from tests.monitoring.trackers.runs import PNG, Noting, lived, sent

folder = sys.argv[1]
lived(folder, [1, 2, 3], reason="interrupted")
stores.of(folder).write_atomic(stores.folder_of(folder) / "loss_curve.png", PNG % b"picture")
tracker = Noting()
assert sent([tracker], folder) == ([], {})
first = state.read(folder, "noting")
assert first.is_finished and first.position.line == 5 and first.run_id
lived(folder, [3, 4], start=2, loss=10.0)
assert sent([tracker], folder) == ([], {})
assert tracker.losses() == [(1, 2.0), (2, 3.0), (3, 4.0), (3, 13.0), (4, 14.0)], tracker.losses()
assert ("picture", 3, "loss_curve.png", len(PNG % b"picture")) in tracker.calls
assert scratch_of(folder) == f"{sys.argv[2]}/capibara/trackers/{state.uid(folder)}"
assert state.read(folder, "noting").run_id == first.run_id
print("done")
"""


@pytest.mark.parametrize("scheme", ["gs", pytest.param("s3", marks=pytest.mark.heavy)])
def test_a_run_in_a_bucket(tmp_path, request, scheme):
    server = request.getfixturevalue({"gs": "bucket_server", "s3": "s3_server"}[scheme])
    environment = {**os.environ, **server.environment, "PYTHONPATH": str(CHECKOUT), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(CODE), f"{scheme}://bucket/tracked", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)
    assert done.stdout == "done\n", done.stderr[-3000:]
