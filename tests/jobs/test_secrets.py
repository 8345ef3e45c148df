"""Secrets are references, and their values stand nowhere."""

import pytest

from capibara.core.types import UserError
from capibara.jobs import secrets
from capibara.jobs.secrets import Secret, Source


@pytest.mark.parametrize(
    ("text", "source", "name"),
    [
        ("A=projects/my-p/secrets/hf", Source.SECRET_MANAGER, "projects/my-p/secrets/hf/versions/latest"),
        ("A=projects/my-p/secrets/hf/versions/3", Source.SECRET_MANAGER, "projects/my-p/secrets/hf/versions/3"),
        ("A=kubernetes:hub/token.txt", Source.KUBERNETES, "hub/token.txt"),
        ("A=env:HF_TOKEN", Source.ENVIRONMENT, "HF_TOKEN"),
    ],
)
def test_references(text, source, name):
    assert secrets.parse(text) == Secret(variable="A", source=source, name=name)


@pytest.mark.parametrize("value", ["hf_verysecret", "kubernetes:hub", "env:", "projects/p/secrets", "x=y", ""])
def test_a_value_is_refused_and_not_repeated(value):
    with pytest.raises(UserError, match="--secret=A=... must be a reference, not a value") as error:
        secrets.parse(f"A={value}")
    assert "verysecret" not in str(error.value)


@pytest.mark.parametrize("text", ["hf_verysecret", "=x", "A-B=env:X"])
def test_a_secret_without_a_variable(text):
    with pytest.raises(UserError, match="--secret must be VARIABLE=REFERENCE") as error:
        secrets.parse(text)
    assert "verysecret" not in str(error.value)
