"""Encryption of checkpoints: AES-256-GCM (NIST SP 800-38D), by the package cryptography.

The manifest is not encrypted but signed (keyed BLAKE2b), and has the hashes of all files, so that a file of another
path, step or run is detected. A complete step of another run with the same key is not.
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
from capibara.core.fields import FilePath
from capibara.core.types import UserError

CIPHER = "AES-256-GCM"
_MAGIC = b"CAPIENC1"
_HEAD = struct.Struct("<8sI")  # magic number, and number of segments
SEGMENT = 64 << 20  # bytes per segment: GCM's limit is just below 2**36, the package's below 2**31
_NONCE, _TAG = 12, 16
_MOST_BYTES = 4096  # of a key file


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Encryption:
    """The key of a run's checkpoints: 32 bytes, as 64 hexadecimal digits or in base64.

    Make one with `openssl rand -hex 32`. Without it the encrypted checkpoints are lost.

    Attributes:
      key_env: name of the environment variable with the key.
      key_file: file with the key instead, in these forms or as raw bytes; None: not used.
      old_key_file: file with the previous key, with which older steps can be read; None: not used.
      encrypt: whether to encrypt new steps; False: encrypted ones can be read, new ones are not encrypted.
      plain_steps: whether a run may resume from an unencrypted step, which anybody could have written.
    """

    key_env: str = "CAPIBARA_CHECKPOINT_KEY"
    key_file: FilePath | None = None
    old_key_file: FilePath | None = None
    encrypt: bool = True
    plain_steps: bool = False

    def key(self) -> Key:
        """The key.

        Raises:
          UserError: it is missing or invalid, or cryptography is not installed.
        """
        if self.key_file is not None:
            return _of_file("key_file", self.key_file)
        name = f"the environment variable {self.key_env}"
        if self.key_env not in os.environ:
            raise UserError(f"{name} is not set: it must hold the checkpoints' key, e.g. of `openssl rand -hex 32`")
        return _key(name, os.environ[self.key_env].encode())

    def keys(self) -> dict[str, Key]:
        """All keys for reading steps, by id.

        Raises:
          UserError: as in `key`.
        """
        result = [self.key()]
        if self.old_key_file is not None:
            result.append(_of_file("old_key_file", self.old_key_file))
        return {key.id: key for key in result}


class Key:
    """A key of 32 bytes.

    Attributes:
      id: identifies the key without revealing it.
    """

    def __init__(self, secret: bytes):
        cryptography = extras.require(
            "cryptography.hazmat.primitives.ciphers.aead", extra="encryption", why="encrypted checkpoints"
        )
        self._cipher: Any = cryptography.AESGCM(secret)
        self.id = _derived(secret, "id")[:8].hex()
        self._content, self._manifest = _derived(secret, "content"), _derived(secret, "manifest")

    def seal(self, data: bytes | memoryview, name: str) -> bytes:
        """Encrypts data and binds it to `name`: it cannot be opened under another name."""
        view = memoryview(data).cast("B")
        count = max(1, -(-len(view) // SEGMENT))
        parts = [_HEAD.pack(_MAGIC, count)]
        for index in range(count):
            nonce = secrets.token_bytes(_NONCE)
            plain = view[index * SEGMENT : (index + 1) * SEGMENT]
            parts += [nonce, self._cipher.encrypt(nonce, plain, _bound_to(name, index, count))]
        return b"".join(parts)

    def open(self, sealed: bytes | memoryview, name: str) -> bytes:
        """The inverse of `seal`.

        Raises:
          Corrupted: it was not sealed with this key and name, or was modified.
        """
        from cryptography.exceptions import InvalidTag

        view = memoryview(sealed).cast("B")
        try:
            magic, count = _HEAD.unpack_from(view)
            if magic != _MAGIC or not count:
                raise ValueError("no magic number, or nothing in it")
            step, parts = _NONCE + SEGMENT + _TAG, []
            for index in range(count):
                begin = _HEAD.size + index * step
                end = begin + step if index + 1 < count else len(view)
                nonce, text = view[begin : begin + _NONCE], view[begin + _NONCE : end]
                parts.append(self._cipher.decrypt(nonce, text, _bound_to(name, index, count)))
        except (InvalidTag, ValueError, struct.error) as error:
            raise Corrupted(f"{name} is not authentic: it has changed since it was encrypted") from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def content_hash(self, data: Any) -> str:
        """A keyed hash of encrypted data, so that guesses cannot be confirmed without the key."""
        return hashlib.blake2b(data, key=self._content, digest_size=16).hexdigest()

    def mac(self, manifest: bytes) -> str:
        """The signature of a manifest."""
        return hashlib.blake2b(manifest, key=self._manifest, digest_size=32).hexdigest()

    def check_mac(self, manifest: bytes, mac: str | None) -> None:
        """Raises Corrupted if a manifest was not signed with this key."""
        if not hmac.compare_digest(self.mac(manifest), mac or ""):
            raise Corrupted("its manifest is not authentic: it was not signed with this key")


def _bound_to(name: str, index: int, count: int) -> bytes:
    return json.dumps([name, index, count]).encode()


def _derived(secret: bytes, purpose: str) -> bytes:
    return hashlib.blake2b(f"capibara checkpoint {purpose}".encode(), key=secret).digest()


def _of_file(field: str, path: str) -> Key:
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES)
    except OSError as error:
        raise UserError(
            f"Encryption.{field} ({path}) cannot be read ({error.strerror}): name a file of yours with the key"
        ) from error
    return _key(f"Encryption.{field} ({path})", content, bare=True)


def _key(name: str, content: bytes, bare: bool = False) -> Key:
    """Parses a key; rejects 32 printable characters, which are probably a password and too weak."""
    if bare and len(content) == 32 and not all(32 <= byte < 127 for byte in content):
        return Key(content)
    text = content.strip()
    for decode in (binascii.unhexlify, functools.partial(base64.b64decode, validate=True)):
        try:
            if len(secret := decode(text)) == 32:
                return Key(secret)
        except ValueError:
            continue
    raise UserError(f"{name} must hold 32 bytes, as 64 hexadecimal digits or in base64, e.g. `openssl rand -hex 32`")
