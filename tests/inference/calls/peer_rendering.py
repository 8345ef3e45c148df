"""Renders dialogues by the peers and prints them as JSON; run by a peer's python: peer_rendering.py FOLDER_OF_TEMPLATES.

Each line has the template's name and text, the dialogue's index, the number of its calls that the template takes, the
prompt, and the assistant's turn as it follows that.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys

from dialogues import DIALOGUES, PLAIN_TOOLS, TOOLS, message

USER = [{"role": "user", "content": "Hi"}]


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(template: str, messages: list, tools: list, prompt: bool) -> str:
        variables = {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_generation_prompt": prompt,
            "functions": "",
            "datetime": "",
        }
        variables |= {"enable_thinking": True, "thinking": True}
        return render_jinja_template([messages], tools, chat_template=template, **variables)[0][0]

    for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.jinja")):
        template = path.read_text()
        for index, (_, _, calls) in enumerate(DIALOGUES):
            errors = []
            for as_text, count, tools in (
                (False, None, TOOLS),
                (True, None, TOOLS),
                (False, 1, TOOLS),
                (False, None, PLAIN_TOOLS),
            ):
                try:
                    turn = message(index, as_text, count)
                    full, begin = render(template, [*USER, turn], tools, False), render(template, USER, tools, True)
                    if "openai" in str(path) or "gptoss" in str(path):
                        for key in ("reasoning_content", "reasoning", "thinking"):
                            turn.pop(key, None) if turn.get("content") and calls else None
                        full = render(template, [*USER, turn], tools, False)
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {error}"[:100])
                    continue
                shared = len(begin)
                if not full.startswith(begin):  # where a line or a tag begins
                    common = os.path.commonprefix([full, begin])
                    shared = (
                        len(re.sub(r"(<[^<>]*|[^<>\n]*)\Z", "", common)) if common[-1:] not in ">\n" else len(common)
                    )
                taken = len(calls[:count])
                print(json.dumps([str(path), template, index, taken, full[:shared], full[shared:]]))
                break
            else:
                print(json.dumps([str(path), template, index, errors[0], "", ""]))


if __name__ == "__main__":
    main()
