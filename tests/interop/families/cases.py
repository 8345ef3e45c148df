"""A tiny config.json of each family of interop/hf/catalog, with all of its variants active. Needs nothing but Python."""

from __future__ import annotations

import dense
import experts
import older

CASES = dense.CASES | older.CASES | experts.CASES
# transformers adds Falcon's ALiBi twice in its eager attention, and once in the one that is its default.
IMPLEMENTATIONS = {"falcon": "sdpa"}
