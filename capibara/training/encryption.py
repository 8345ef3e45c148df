"""Checkpoints that nobody can read or forge without a key: AES-256-GCM (NIST SP 800-38D), by the package cryptography."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import hashlib
import json
import os
import secrets
import struct
from typing import Any

import xxhash

from capibara import extras
from capibara.config import configurable
from capibara.training.manifest import Damaged
from capibara.types import UserError

CIPHER = "AES-256-GCM"
_MAGIC = b"CAPIENC1"
_HEAD = struct.Struct("<8sI")  # the magic number, and how many segments follow
_SEGMENT = 64 << 20  # bytes that are encrypted at a time: GCM ends below 2**36, the package below 2**31
_NONCE, _TAG = 12, 16


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Encryption:
    """Where the key of a run's checkpoints is: 32 bytes, as 64 hexadecimal digits or in base64.

    A new one: `openssl rand -hex 32`. What it encrypts is lost with it.

    Attributes:
      key_env: the environment variable that holds it.
      key_file: a file that holds it instead, in these forms or as bare bytes; None: none.
    """

    key_env: str = "CAPIBARA_CHECKPOINT_KEY"
    key_file: str | None = None

    def key(self) -> Key:
        """The key.

        Raises:
          UserError: there is none, or it is no such key; or cryptography is not installed.
        """
        if self.key_file is not None:
            name = f"Encryption.key_file ({self.key_file})"
            try:
                with open(self.key_file, "rb") as file:
                    given = file.read()
            except OSError as error:
                raise UserError(
                    f"{name} cannot be read ({error.strerror}): name a file of yours with the key"
                ) from error
        else:
            name = f"the environment variable {self.key_env}"
            if self.key_env not in os.environ:
                raise UserError(f"{name} is not set: it must hold the checkpoints' key, e.g. of `openssl rand -hex 32`")
            given = os.environ[self.key_env].encode()
        secret = _parse(given)
        if secret is None:
            raise UserError(
                f"{name} must hold 32 bytes, as 64 hexadecimal digits or in base64, e.g. `openssl rand -hex 32`"
            )
        return Key(secret)


class Key:
    """A key of 32 bytes.

    Attributes:
      id: names it without telling anything of it.
    """

    def __init__(self, secret: bytes):
        cryptography = extras.require(
            "cryptography.hazmat.primitives.ciphers.aead", extra="encryption", why="encrypted checkpoints"
        )
        self._cipher: Any = cryptography.AESGCM(secret)
        self.id = _derived(secret, "id")[:8].hex()
        self._seed = int.from_bytes(_derived(secret, "content")[:8], "little")

    def seal(self, data: bytes | memoryview, name: str) -> bytes:
        """Data encrypted as what `name` says: under another name it does not open."""
        view = memoryview(data).cast("B")
        count = max(1, -(-len(view) // _SEGMENT))
        parts = [_HEAD.pack(_MAGIC, count)]
        for index in range(count):
            nonce = secrets.token_bytes(_NONCE)
            plain = view[index * _SEGMENT : (index + 1) * _SEGMENT]
            parts += [nonce, self._cipher.encrypt(nonce, plain, _bound_to(name, index, count))]
        return b"".join(parts)

    def open(self, sealed: bytes | memoryview, name: str) -> bytes:
        """What `seal` was given.

        Raises:
          Damaged: it was not sealed by this key under this name, or has changed since.
        """
        from cryptography.exceptions import InvalidTag

        view = memoryview(sealed).cast("B")
        try:
            magic, count = _HEAD.unpack_from(view)
            if magic != _MAGIC:
                raise ValueError("no magic number")
            step, parts = _NONCE + _SEGMENT + _TAG, []
            for index in range(count):
                begin = _HEAD.size + index * step
                end = begin + step if index + 1 < count else len(view)
                nonce, text = view[begin : begin + _NONCE], view[begin + _NONCE : end]
                parts.append(self._cipher.decrypt(nonce, text, _bound_to(name, index, count)))
        except (InvalidTag, ValueError, struct.error) as error:
            raise Damaged(f"{name} is not authentic: it has changed since it was encrypted") from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def content_hash(self, data: Any) -> str:
        """The hash of what is encrypted; without the key nobody can compare it with that of a guess."""
        return xxhash.xxh3_128_hexdigest(data, seed=self._seed)


def _bound_to(name: str, index: int, count: int) -> bytes:
    return json.dumps([name, index, count]).encode()


def _derived(secret: bytes, purpose: str) -> bytes:
    return hashlib.blake2b(f"capibara checkpoint {purpose}".encode(), key=secret).digest()


@functools.cache
def _parse(given: bytes) -> bytes | None:
    if len(given) == 32:
        return given
    text = given.strip()
    for decode in (binascii.unhexlify, functools.partial(base64.b64decode, validate=True)):
        try:
            if len(found := decode(text)) == 32:
                return found
        except ValueError:
            continue
    return None
