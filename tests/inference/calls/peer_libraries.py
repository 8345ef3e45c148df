"""Renders dialogues by mistral-common and openai-harmony, in the form of `peer_rendering`; run by a peer's python."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re

from dialogues import DIALOGUES, TOOLS, message

_BYTES = re.compile(r"(?:<0x[0-9A-F]{2}>)+")  # findings/mistral_common_kept_bytes.sh


def mistral() -> None:
    """By each of the tokenizers that the package has."""
    import mistral_common
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    for path in sorted((pathlib.Path(mistral_common.__file__).parent / "data").iterdir()):
        if "v1" == path.suffix[1:] or path.suffix not in (".v2", ".v3", ".v7", ".v7m1", ".json"):
            continue
        tokenizer = MistralTokenizer.from_file(str(path))
        encoder = tokenizer.instruct_tokenizer.tokenizer
        for index in range(len(DIALOGUES)):
            turn = message(index, as_text=True)
            for key in ("reasoning_content", "reasoning", "thinking"):
                turn.pop(key, None)
            if turn.get("tool_calls"):
                turn["content"] = turn["content"] or None
            user, results = [{"role": "user", "content": "Hi"}], []
            for call in turn.get("tool_calls", ()):
                results.append(
                    {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "R"}
                )
            rendered = []
            try:
                for messages in (user, [*user, turn, *(results or user)]):
                    request = ChatCompletionRequest(messages=messages, tools=TOOLS)
                    ids = tokenizer.encode_chat_completion(request).tokens
                    rendered.append(encoder.decode(ids, special_token_policy=SpecialTokenPolicy.KEEP))
            except Exception as error:
                row = [path.name, "", index, f"{type(error).__name__}: {error}"[:100], "", ""]
                print(json.dumps(row))
                continue
            after = rendered[1].split("[/INST]", 1)[1]
            text = _BYTES.sub(lambda match: bytes.fromhex(match[0].replace("<0x", "").replace(">", "")).decode(), after)
            text = text.split("</s>")[0].replace("\u2581", " ").removeprefix(" ")
            form = "[TOOL_CALLS][ARGS]" if "[ARGS]" in rendered[1] else "[TOOL_CALLS]"
            print(json.dumps([path.name, form, index, len(turn.get("tool_calls", ())), "", text]))


def harmony() -> None:
    """By the encoding of gpt-oss; TIKTOKEN_ENCODINGS_BASE names a folder with o200k_base.tiktoken."""
    from openai_harmony import (
        Conversation,
        HarmonyEncodingName,
        Message,
        RenderConversationConfig,
        Role,
        load_harmony_encoding,
    )

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    for index, (content, thought, calls) in enumerate(DIALOGUES):
        messages = []
        if thought:
            messages.append(Message.from_role_and_content(Role.ASSISTANT, thought).with_channel("analysis"))
        if content:
            channel = "commentary" if calls else "final"
            messages.append(Message.from_role_and_content(Role.ASSISTANT, content).with_channel(channel))
        for name, arguments in calls:
            call = Message.from_role_and_content(Role.ASSISTANT, json.dumps(arguments, ensure_ascii=False))
            call = (
                call.with_channel("commentary")
                .with_recipient(f"functions.{name}")
                .with_content_type("<|constrain|>json")
            )
            messages.append(call)
        ids = encoding.render_conversation(
            Conversation.from_messages(messages), config=RenderConversationConfig(auto_drop_analysis=False)
        )
        text = encoding.decode(ids).removeprefix("<|start|>assistant")
        print(json.dumps(["openai-harmony", "<|channel|><|message|>", index, len(calls), "", text]))


if __name__ == "__main__":
    for package, render in (("mistral_common", mistral), ("openai_harmony", harmony)):
        if importlib.util.find_spec(package) is not None:
            render()
