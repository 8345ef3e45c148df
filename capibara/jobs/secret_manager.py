"""Reads secrets of Google's Secret Manager, as the service account of the machine."""

from __future__ import annotations

import base64
import binascii
import json

from capibara.core import extras
from capibara.core.types import TryAgain, UserError

_ADDRESS = "https://secretmanager.googleapis.com/v1"
_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_DENIED, _MISSING = (401, 403), 404


def read(name: str, address: str = _ADDRESS) -> str:
    """The value of a secret's version, without a newline at its end.

    Args:
      name: projects/P/secrets/S/versions/V.
      address: of the service.

    Raises:
      UserError: there is no such version, or this machine's account may not read it.
      TryAgain: the service does not answer.
    """
    for library in ("google.auth", "requests"):
        extras.require(library, extra="gcs", why=name)
    import google.auth
    import google.auth.exceptions
    import google.auth.transport.requests
    import requests

    try:
        credentials, _ = google.auth.default(scopes=_SCOPES)
        session = google.auth.transport.requests.AuthorizedSession(credentials)
        answer = session.get(f"{address}/{name}:access", timeout=30)
    except (google.auth.exceptions.TransportError, requests.RequestException) as error:
        raise TryAgain(f"Secret Manager does not answer for {name}: {type(error).__name__}") from None
    except google.auth.exceptions.GoogleAuthError as error:
        raise UserError(f"{name} cannot be read: this machine has no service account: {error}") from None
    if answer.status_code in _DENIED:
        raise UserError(
            f"{name} cannot be read by this machine's service account: grant it roles/secretmanager.secretAccessor"
        )
    if answer.status_code == _MISSING:
        raise UserError(f"{name} does not exist: make it, or name another in --secret")
    if not answer.ok:
        raise TryAgain(f"Secret Manager answers {answer.status_code} for {name}")
    try:
        return base64.b64decode(json.loads(answer.text)["payload"]["data"]).decode().removesuffix("\n")
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise UserError(f"{name} is not text in UTF-8, so no variable can hold it") from None
