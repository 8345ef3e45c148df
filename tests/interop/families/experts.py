"""Cases of interop/hf/catalog/experts."""

from __future__ import annotations

from typing import Any

CASES: dict[str, dict[str, Any]] = {}
