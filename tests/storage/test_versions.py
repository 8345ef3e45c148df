"""Versions of files in Google Cloud Storage when requests fail; test_stores.py has the tests for all buckets."""

import secrets

import pytest
from etils import epath

from capibara.storage import versions
from capibara.storage.store import NONE

VERSIONS, MOST = versions.of("gs"), 1 << 16


@pytest.fixture
def path(gs):
    return epath.Path(f"gs://bucket/{secrets.token_hex(4)}/a file")


def test_a_version_and_its_content_are_of_one_file_though_another_writes_between_the_two_requests(path, gs):
    first, later = VERSIONS.write(path, b"one", NONE), []

    def written(method, asked):
        if method == "GET" and "alt=media" in asked and not later:
            later.append(VERSIONS.write(path, b"two", first))

    with gs.failing(written):
        assert VERSIONS.read(path, MOST) == (b"two", *later)


@pytest.mark.fault(66)
@pytest.mark.parametrize("status", [429, 503, "lost"])
def test_what_the_bucket_refuses_for_now_is_asked_again(path, gs, flaky, status):
    """Including a lost answer: the retry finds our own version, not another writer's."""
    with gs.failing(flaky.times(1, status, "POST", "/o?")):
        version = VERSIONS.write(path, b"one", NONE)
    with gs.failing(flaky.times(1, 503 if status == "lost" else status, "GET", "/a file")):
        assert VERSIONS.read(path, MOST) == (b"one", version)


@pytest.mark.fault(66)
def test_an_answer_that_stops_half_way_is_asked_for_again(path, gs, flaky):
    version = VERSIONS.write(path, b"0123456789", NONE)
    with gs.failing(flaky.times(1, "cut", "GET", "alt=media")):
        assert VERSIONS.read(path, MOST) == (b"0123456789", version)
    assert sum("alt=media" in asked[1] for asked in gs.asked) >= 2


@pytest.mark.fault(66)
def test_permission_that_is_lost_is_said_at_once(path, gs, flaky):
    with gs.failing(flaky.times(9, 403, "POST", "/o?")), pytest.raises(OSError, match="Forbidden"):
        VERSIONS.write(path, b"one", NONE)
    assert VERSIONS.read(path, MOST) == (b"", NONE)
