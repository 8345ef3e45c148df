"""Where transformers' generate stops with the folders of test_transformers_stops.py, which runs this with torch:

python tests/interop/stops_peer.py FOLDER    continues the prompts of FOLDER/NAME/prompts.json with FOLDER/NAME/after,
                                             into FOLDER/NAME/found.json
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM

NEW_TOKENS = 8


def main() -> None:
    torch.set_num_threads(1)
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*/prompts.json")):
        model = AutoModelForCausalLM.from_pretrained(path.parent / "after", dtype=torch.float32).eval()
        found = []
        for prompt in json.loads(path.read_text()):
            ids = torch.tensor([prompt])
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
            )
            found.append(made[0, len(prompt) :].tolist())
        (path.parent / "found.json").write_text(json.dumps(found))
        print(path.parent.name, flush=True)


if __name__ == "__main__":
    main()
