"""Checkpoints that nobody can read or forge without a key: AES-256-GCM (NIST SP 800-38D), by the package cryptography.

The manifest is not encrypted but signed (keyed BLAKE2b), with the hashes of all files: a file of another place, step or run
is told from the right one. A whole step of another run with the same key is not.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import hashlib
import hmac
import json
import os
import secrets
import struct
from typing import Any

from capibara.checkpoints.manifest import Corrupted
from capibara.config import configurable
from capibara.core import extras
from capibara.core.types import UserError

CIPHER = "AES-256-GCM"
_MAGIC = b"CAPIENC1"
_HEAD = struct.Struct("<8sI")  # the magic number, and how many segments follow
_SEGMENT = 64 << 20  # bytes that are encrypted at a time: GCM ends below 2**36, the package below 2**31
_NONCE, _TAG = 12, 16
_MOST_BYTES = 4096  # of a file that has a key


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Encryption:
    """Where the key of a run's checkpoints is: 32 bytes, as 64 hexadecimal digits or in base64.

    A new one: `openssl rand -hex 32`. What it encrypts is lost with it.

    Attributes:
      key_env: the environment variable that holds it.
      key_file: a file that holds it instead, in these forms or as bare bytes; None: none.
      old_key_file: holds the key before this one, with which steps are still read; None: none.
      encrypt: new steps are encrypted; False: encrypted ones are read, and new ones are not.
      plain_steps: a run may resume from a step that is not encrypted: anybody may have written that.
    """

    key_env: str = "CAPIBARA_CHECKPOINT_KEY"
    key_file: str | None = None
    old_key_file: str | None = None
    encrypt: bool = True
    plain_steps: bool = False

    def key(self) -> Key:
        """The key.

        Raises:
          UserError: there is none, or it is no such key; or cryptography is not installed.
        """
        if self.key_file is not None:
            return _of_file("key_file", self.key_file)
        name = f"the environment variable {self.key_env}"
        if self.key_env not in os.environ:
            raise UserError(f"{name} is not set: it must hold the checkpoints' key, e.g. of `openssl rand -hex 32`")
        return _key(name, os.environ[self.key_env].encode())

    def keys(self) -> dict[str, Key]:
        """All keys that steps are read with, by their ids.

        Raises:
          UserError: as of `key`.
        """
        found = [self.key()]
        if self.old_key_file is not None:
            found.append(_of_file("old_key_file", self.old_key_file))
        return {key.id: key for key in found}


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
        self._content, self._manifest = _derived(secret, "content"), _derived(secret, "manifest")

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
          Corrupted: it was not sealed by this key under this name, or has changed since.
        """
        from cryptography.exceptions import InvalidTag

        view = memoryview(sealed).cast("B")
        try:
            magic, count = _HEAD.unpack_from(view)
            if magic != _MAGIC or not count:
                raise ValueError("no magic number, or nothing in it")
            step, parts = _NONCE + _SEGMENT + _TAG, []
            for index in range(count):
                begin = _HEAD.size + index * step
                end = begin + step if index + 1 < count else len(view)
                nonce, text = view[begin : begin + _NONCE], view[begin + _NONCE : end]
                parts.append(self._cipher.decrypt(nonce, text, _bound_to(name, index, count)))
        except (InvalidTag, ValueError, struct.error) as error:
            raise Corrupted(f"{name} is not authentic: it has changed since it was encrypted") from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def content_hash(self, data: Any) -> str:
        """The hash of what is encrypted; without the key nobody can compare it with that of a guess."""
        return hashlib.blake2b(data, key=self._content, digest_size=16).hexdigest()

    def mac(self, manifest: bytes) -> str:
        """The signature of a manifest."""
        return hashlib.blake2b(manifest, key=self._manifest, digest_size=32).hexdigest()

    def check_mac(self, manifest: bytes, mac: str | None) -> None:
        """Raises Corrupted where a manifest was not signed with this key."""
        if not hmac.compare_digest(self.mac(manifest), mac or ""):
            raise Corrupted("its manifest is not authentic: it was not signed with this key")


def _bound_to(name: str, index: int, count: int) -> bytes:
    return json.dumps([name, index, count]).encode()


def _derived(secret: bytes, purpose: str) -> bytes:
    return hashlib.blake2b(f"capibara checkpoint {purpose}".encode(), key=secret).digest()


def _of_file(field: str, path: str) -> Key:
    try:
        with open(path, "rb") as file:
            given = file.read(_MOST_BYTES)
    except OSError as error:
        raise UserError(
            f"Encryption.{field} ({path}) cannot be read ({error.strerror}): name a file of yours with the key"
        ) from error
    return _key(f"Encryption.{field} ({path})", given, bare=True)


def _key(name: str, given: bytes, bare: bool = False) -> Key:
    """The key that is given in one of its forms; 32 characters that one can type are a password, and too weak for one."""
    if bare and len(given) == 32 and not all(32 <= byte < 127 for byte in given):
        return Key(given)
    text = given.strip()
    for decode in (binascii.unhexlify, functools.partial(base64.b64decode, validate=True)):
        try:
            if len(secret := decode(text)) == 32:
                return Key(secret)
        except ValueError:
            continue
    raise UserError(f"{name} must hold 32 bytes, as 64 hexadecimal digits or in base64, e.g. `openssl rand -hex 32`")
