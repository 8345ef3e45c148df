"""A tiny config.json of each family of interop/hf/catalog, with all of its variants active. Needs nothing but numpy."""

from __future__ import annotations

import dense_families
import encdec_families
import encoder_families
import expert_families
import hybrid_families
import older_families

CASES = dense_families.CASES | older_families.CASES | expert_families.CASES | hybrid_families.CASES
CASES |= encoder_families.CASES | encdec_families.CASES
# transformers adds Falcon's ALiBi twice in its eager attention, and once in the one that is its default.
IMPLEMENTATIONS = {"falcon": "sdpa"}
# Ends of the names of parameters that are not trained.
UNTRAINED = {"pegasus": ("embed_positions.weight",)}
# Classes that AutoModelForCausalLM does not know.
CLASSES = {"mistral4": "Mistral4ForCausalLM"}
