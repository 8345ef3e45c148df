"""Jobs for tests."""

from capibara.jobs.spec import Bundle, JobSpec
from capibara.planner.hardware import slices

WHEEL = "capibara_tpu-1.0-py3-none-any.whl"
SUM = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of an empty file


def job(slice_="v5e-64", *, wheel=False, **fields):
    files = {"gin/0/run.gin": SUM, **({WHEEL: SUM} if wheel else {})}
    bundle = Bundle(url="gs://bucket/jobs/run/0123456789abcdef", files=files)
    given = {"name": "run", "arguments": ("--gin_file=run.gin",), "image": None if wheel else "registry/capibara:1"}
    return JobSpec(**{**given, "bundle": bundle, "slice_": slices.parse(slice_), **fields})
