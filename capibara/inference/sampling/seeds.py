"""Seeds of texts that depend on each other."""

from __future__ import annotations

import hashlib


def draw_seed(*parts: int | str) -> int:
    """A seed of 32 bits that depends on all of the parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
