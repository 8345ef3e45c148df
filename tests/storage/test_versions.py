"""Files in a bucket that change only where nobody else has changed them."""

import concurrent.futures
import secrets

import pytest
from etils import epath

from capibara.storage import versions
from capibara.storage.versions import NONE, Changed


@pytest.fixture
def path(gs):
    return epath.Path(f"gs://bucket/{secrets.token_hex(4)}/a file")


def test_a_file_is_written_and_removed_at_the_version_that_was_seen_alone(path):
    assert versions.read(path) == (b"", NONE)
    first = versions.write(path, b"one", NONE)
    for expected in (NONE, first + 1):
        with pytest.raises(Changed):
            versions.write(path, b"another", expected)
    assert versions.read(path) == (b"one", first)
    second = versions.write(path, b"two", first)
    versions.remove(path, first)
    assert versions.read(path) == (b"two", second)
    versions.remove(path, second)
    versions.remove(path, second)
    assert versions.read(path) == (b"", NONE)


def test_a_file_that_is_larger_than_any_of_ours_is_not_read(path, gs):
    before, version = len(gs.asked), versions.write(path, b"x" * (versions._MOST_BYTES + 1), NONE)
    assert versions.read(path) == (b"", version)
    assert not any("alt=media" in asked[1] for asked in gs.asked[before:])


def test_a_version_and_its_content_are_of_one_file_though_another_writes_between_the_two_requests(path, gs):
    first, later = versions.write(path, b"one", NONE), []

    def written(method, asked):
        if method == "GET" and "alt=media" in asked and not later:
            later.append(versions.write(path, b"two", first))

    with gs.failing(written):
        assert versions.read(path) == (b"two", *later)


def test_of_several_at_once_one_wins(path):
    def tried(number, expected):
        try:
            return versions.write(path, f"{number}".encode(), expected), number
        except Changed:
            return None

    version = NONE
    for _ in range(3):
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            found = [one for one in pool.map(tried, range(6), [version] * 6) if one]
        assert len(found) == 1
        content, version = versions.read(path)
        assert (version, int(content)) == found[0]


@pytest.mark.fault(66)
@pytest.mark.parametrize("status", [429, 503, "lost"])
def test_what_the_bucket_refuses_for_now_is_asked_again(path, gs, flaky, status):
    """An answer that is lost, too: the second request finds our own version, which is no other's."""
    with gs.failing(flaky.times(1, status, "POST", "/o?")):
        version = versions.write(path, b"one", NONE)
    with gs.failing(flaky.times(1, 503 if status == "lost" else status, "GET", "/a file")):
        assert versions.read(path) == (b"one", version)


@pytest.mark.fault(66)
def test_an_answer_that_stops_half_way_is_asked_for_again(path, gs, flaky):
    version = versions.write(path, b"0123456789", NONE)
    with gs.failing(flaky.times(1, "cut", "GET", "alt=media")):
        assert versions.read(path) == (b"0123456789", version)
    assert sum("alt=media" in asked[1] for asked in gs.asked) >= 2


@pytest.mark.fault(66)
def test_permission_that_is_lost_is_said_at_once(path, gs, flaky):
    with gs.failing(flaky.times(9, 403, "POST", "/o?")), pytest.raises(OSError, match="Forbidden"):
        versions.write(path, b"one", NONE)
    assert versions.read(path) == (b"", NONE)
