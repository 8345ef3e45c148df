"""A tiny config.json of each family of interop/hf/catalog, with all of its variants active. Needs nothing but numpy."""

from __future__ import annotations

import dense_families
import encdec_families
import encoder_families
import expert_families
import hybrid_families
import older_families
import wrapped_families

CASES = dense_families.CASES | older_families.CASES | expert_families.CASES | hybrid_families.CASES
CASES |= encoder_families.CASES | encdec_families.CASES | wrapped_families.CASES
# transformers adds Falcon's ALiBi twice in its eager attention, and once in the one that is its default.
IMPLEMENTATIONS = {"falcon": "sdpa"}
# Modules that answer for a class whose own forward fails on text in transformers 5.24.
ANSWERING = {"llama4": "language_model"}
# Ends of the names of parameters that are not trained.
UNTRAINED = dict.fromkeys(("pegasus", "marian"), ("embed_positions.weight",))
# Ends of the names of tensors that are no parameters: files may lack them, and transformers computes them then.
CONSTANTS = {"minimax": ("slope_rate", "query_decay", "key_decay", "diagonal_decay")}
CONSTANTS |= {"roformer": ("embed_positions.weight",), "esm": ("inv_freq",)}
# Classes that AutoModelForCausalLM does not know.
CLASSES = {"mistral4": "Mistral4ForCausalLM"} | wrapped_families.CLASSES
# Types whose tensors transformers writes with names that published files do not have.
RENAMED = {"esm"}
