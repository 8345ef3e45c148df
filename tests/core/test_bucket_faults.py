"""Faults of buckets in a line: the user's to mend, to be tried again, or none of theirs."""

import errno

import pytest

from capibara.core import bucket_faults
from capibara.core.types import TryAgain, UserError
from capibara.multihost import exits

gcsfs = pytest.importorskip("gcsfs.retry")
google = pytest.importorskip("google.api_core.exceptions")
aiohttp = pytest.importorskip("aiohttp.client_exceptions")
botocore = pytest.importorskip("botocore.exceptions")
s3fs = pytest.importorskip("s3fs.errors")


def s3(status, code, translated=True):
    """What S3's answer becomes in botocore, and in s3fs."""
    answer = {"Error": {"Code": code, "Message": "as told"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = botocore.ClientError(answer, "PutObject")
    return s3fs.translate_boto_error(error) if translated else error


@pytest.fixture(autouse=True)
def _no_bucket_is_named(monkeypatch):
    monkeypatch.setattr(bucket_faults, "_named", set())


@pytest.mark.parametrize(
    "error, kind, said",
    [
        (
            OSError("Forbidden: https://storage.googleapis.com/storage/v1/b/x/o\nno access"),
            UserError,
            "permission denied in gs://x (",
        ),
        (OSError("Forbidden: b/x/o/run%2Fa no"), UserError, "permission denied in gs://x ("),
        (gcsfs.HttpError({"code": 401, "message": "who?"}), UserError, "permission denied in a bucket ("),
        (google.Forbidden("403 POST http://storage/upload"), UserError, "permission denied"),
        (google.ServiceUnavailable("503 POST http://storage/upload"), TryAgain, "does not answer"),
        (google.BadRequest("400 POST http://storage/upload"), None, ""),
        (ValueError("PERMISSION_DENIED: reading gs://x/y"), UserError, "permission denied in gs://x ("),
        (FileNotFoundError("b/no-such/o/run"), UserError, "does not exist"),
        (gcsfs.HttpError({"code": 429, "message": "slow down"}), TryAgain, "does not answer"),
        (gcsfs.HttpError({"code": "503", "message": "busy"}), TryAgain, "does not answer"),
        (aiohttp.ServerDisconnectedError(), TryAgain, "does not answer"),
        (gcsfs.HttpError({"code": 400, "message": "bad"}), None, ""),
        (
            s3(403, "AccessDenied"),
            UserError,
            "permission denied in an S3 bucket (as told): let this machine's account",
        ),
        (s3(403, "403"), UserError, "permission denied in an S3 bucket ("),
        (s3(403, "AccessDenied", translated=False), UserError, "permission denied in an S3 bucket ("),
        (s3(400, "ExpiredToken"), UserError, "permission denied in an S3 bucket (as told)"),
        (
            botocore.NoCredentialsError(),
            UserError,
            "permission denied in an S3 bucket (Unable to locate credentials)",
        ),
        (s3(404, "NoSuchBucket"), UserError, "an S3 bucket does not exist (as told): create it, or name another path"),
        (s3(503, "SlowDown"), TryAgain, "S3 does not answer after several tries ([Errno 16] as told)"),
        (s3(500, "InternalError"), TryAgain, "S3 does not answer"),
        (botocore.EndpointConnectionError(endpoint_url="http://s3"), TryAgain, "S3 does not answer"),
        (botocore.ReadTimeoutError(endpoint_url="http://s3"), TryAgain, "S3 does not answer"),
        (s3(404, "NoSuchKey"), None, ""),
        (s3(400, "InvalidRequest"), None, ""),
        (PermissionError(errno.EACCES, "Permission denied", "/etc/x"), None, ""),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/b/x/o"), None, ""),
        (ValueError("Forbidden: nothing of a bucket"), None, ""),
    ],
)
def test_each_fault(error, kind, said, capfd):
    found = bucket_faults.explained([error])
    assert (
        (found is None) if kind is None else (isinstance(found, kind) and said in str(found) and "\n" not in str(found))
    )

    def main(argv):
        raise RuntimeError("saving failed") from error

    if kind is None:
        with pytest.raises(RuntimeError):
            exits.run_verb(main, [])
    else:
        assert exits.run_verb(main, []) == (75 if kind is TryAgain else 2)
        assert capfd.readouterr().err == f"error: {found}\n"


@pytest.mark.parametrize(
    "error, code, said",
    [
        (OSError("Forbidden: b/x/o"), 2, "permission denied in gs://x ("),
        (google.ServiceUnavailable("503 POST http://storage/upload"), 75, "does not answer"),
        (FileNotFoundError("b/no-such/o/run"), 2, "a is cut short: copy it again"),  # whose reader knows more of it
        (OSError(errno.EIO, "Input/output error"), 2, "a is cut short: copy it again"),
    ],
)
def test_a_reader_that_blames_the_file_does_not_hide_the_bucket(error, code, said, capfd):
    """Whatever read it, and whether or not it names the cause."""

    def main(argv):
        try:
            raise error
        except OSError:
            raise UserError("a is cut short: copy it again") from None
        except google.ServiceUnavailable as cause:
            raise UserError("a is cut short: copy it again") from cause

    assert exits.run_verb(main, []) == code
    told = capfd.readouterr().err
    assert told.startswith("error: ") and said in told and told.count("\n") == 1


def test_the_only_s3_bucket_of_a_process_is_named():
    for url, said in (
        ("s3://mine/run", "in s3://mine ("),
        ("gs://other/run", "in s3://mine ("),
        ("s3://third", "in an S3"),
    ):
        bucket_faults.note(url)
        assert said in str(bucket_faults.explained([s3(403, "AccessDenied")]))
