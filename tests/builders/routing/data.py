"""Records of the six domains, made up."""

from __future__ import annotations

import json
import pathlib
import random

WORDS = [f"{first}{vowel}{last}" for first in "bcdfgklmnprst" for vowel in "aeiou" for last in ("n", "r", "st", "ll")]
FORMS = {
    "python": "def find_{0}(items):\n    # {1}\n    for item in items:\n        if item > {0}:\n            return item\n    return None\n",
    "sql": "SELECT name_{0}, count(*) FROM table_{0} WHERE size > {0} GROUP BY name_{0} -- {1}\n",
    "javascript": "const add_{0} = (x) => x + {0};\n// {1}\nconsole.log(add_{0}(3));\n",
    "debug": "Why does this code fail?\n\nTraceback (most recent call last)\nNameError: name_{0} {1}. Find the root cause.\n",
    "ml": "import numpy as np\nimport jax\n\n# {1}\nweights = np.zeros({0})\nprint(jax.grad(sum)(weights))\n",
    "api": "import requests\n\n# {1}\nreply = requests.get('https://example.com/items/{0}')\nprint(reply.json())\n",
}
DOMAINS = tuple(FORMS)


def prose(draw: random.Random, count: int = 24) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


def documents(per_domain: int = 20, *, of_source: int = 2, seed: int = 0) -> list[dict]:
    """Documents of all domains that declare none; so many of one source."""
    draw, found = random.Random(seed), []
    for number in range(per_domain):
        for domain, form in FORMS.items():
            text = form.format(number + 1000 * seed, prose(draw))
            found.append({"text": text, "source": f"{seed}/{domain}/{number // of_source}"})
    return found


def write(path: pathlib.Path, records: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def read(folder: pathlib.Path | str, name: str) -> list[dict]:
    return [json.loads(line) for line in pathlib.Path(folder, name).open()]


def examples(folder: pathlib.Path | str) -> list[dict]:
    """The records of all splits."""
    return [record for split in ("train", "validation", "test") for record in read(folder, f"{split}.jsonl")]
