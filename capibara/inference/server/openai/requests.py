"""Bodies of OpenAI's completions and chat API: parameters, their types, and what is refused.

Parameters beyond OpenAI's, as in vLLM: add_generation_prompt, add_special_tokens, allowed_token_ids, bad_words, cache_salt,
continue_final_message, echo of chats, guided_*, ignore_eos, include_reasoning, include_stop_str_in_output, min_p,
min_tokens, prompt_logprobs, repetition_penalty, return_token_ids, return_tokens_as_token_ids, skip_special_tokens,
stop_token_ids, structured_outputs, thinking_token_budget, top_k, truncate_prompt_tokens and truncation_side;
thinking_tokens as in `Sampling`; thinking_strategy is ours.
"""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from capibara.inference.engine.requests.request import LIKELIEST
from capibara.inference.server.service.bodies import TextParameters
from capibara.inference.server.service.http_errors import Refusal

# Unsupported parameters -> their values that request nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("functions", "suffix", "web_search_options", "prediction", "audio"), ({}, [], "")),
    **{"function_call": ("none",), "modalities": (["text"],)},
    **{"verbosity": (), "moderation": ()},
    # vLLM's
    **dict.fromkeys(("logprob_token_ids", "prompt_embeds", "mm_processor_kwargs"), ([], {}, "")),
    **{"use_beam_search": (False,), "length_penalty": (1.0,), "priority": (0,)},
    **{"chat_template": (), "kv_transfer_params": ({},)},
}
# Parameters that do not change the text.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "spaces_between_special_tokens", "request_id",
)  # fmt: skip


class StreamOptions(pydantic.BaseModel):
    """Options of a stream."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SampledParameters(TextParameters):
    """How tokens are chosen, in all of OpenAI's APIs; None: not set."""

    seed: int | None = pydantic.Field(None, ge=-(2**63), lt=2**63)

    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    top_p: float | None = pydantic.Field(None, ge=0, le=1)
    top_k: int | None = pydantic.Field(None, ge=-1)  # 0, -1: all
    min_p: float | None = pydantic.Field(None, ge=0, le=1)
    repetition_penalty: float | None = pydantic.Field(None, ge=0.01, le=100)
    presence_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    frequency_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    thinking_tokens: int | None = pydantic.Field(None, ge=1)
    min_tokens: int | None = pydantic.Field(None, ge=0)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stop: Any = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    cache_salt: str | None = pydantic.Field(None, min_length=1, max_length=1024)
    thinking_token_budget: int | None = pydantic.Field(None, ge=-1)  # -1: no limit


class ApiRequest(SampledParameters):
    """The parameters common to completions and chat; None: not set."""

    unsupported = UNSUPPORTED
    ignored = IGNORED

    model: str
    max_tokens: int | None = pydantic.Field(None, ge=1)
    prompt_logprobs: int | None = pydantic.Field(None, ge=0, le=LIKELIEST)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = pydantic.Field(None, ge=-1)
    truncation_side: Literal["left", "right"] = "left"
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_grammar: Any = None
    guided_choice: Any = None
    n: int | None = pydantic.Field(None, ge=1)
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            message = "stream_options needs stream = true: leave it out"
            raise Refusal(400, message, param="stream_options", code="invalid_value")
        if self.thinking_token_budget is not None and self.thinking_tokens is not None:
            message = "thinking_token_budget and thinking_tokens mean the same: leave one out"
            raise Refusal(400, message, param="thinking_token_budget", code="invalid_value")
        if self.thinking_token_budget == 0:
            message = (
                "thinking_token_budget is 0, must be at least 1, or -1 for no limit: templates switch thoughts off"
            )
            raise Refusal(400, message, param="thinking_token_budget", code="invalid_value")
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs is not available in a stream: set stream = false"
            raise Refusal(400, message, param="prompt_logprobs", code="invalid_value")

    @property
    def prompt_likeliest(self) -> int | None:
        """How many of the likeliest tokens to return for each token of the prompt; None: it is not scored."""
        return self.prompt_logprobs

    @property
    def longest(self) -> tuple[str, int | None]:
        """The parameter that limits the text's length, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def answers(self) -> bool:
        """Whether the text is an answer, which may be as long as fits where no limit is named, as OpenAI's."""
        return False

    @property
    def likeliest(self) -> int:
        """How many of the likeliest tokens to return."""
        return 0

    @property
    def drawn(self) -> int:
        """How many texts are drawn for each prompt."""
        return self.n or 1

    @property
    def has_format(self) -> bool:
        """Whether an answer has a format; what vLLM calls guided is the text itself, calls included."""
        return self.response_format is not None and self.response_format.get("type") != "text"

    @property
    def structured(self) -> dict[str, Any]:
        """What the text must match, by the parameters' names."""
        return {
            "response_format": self.response_format,
            "structured_outputs": self.structured_outputs,
            "guided_json": self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_grammar": self.guided_grammar,
            "guided_choice": self.guided_choice,
        }


class CompletionRequest(ApiRequest):
    """The body of POST /v1/completions."""

    prompt: Any
    add_special_tokens: bool | None = None
    echo: bool | None = None
    best_of: int | None = pydantic.Field(None, ge=1)
    logprobs: int | None = pydantic.Field(None, ge=0, le=LIKELIEST)

    def check(self) -> None:
        super().check()
        drawn, n = self.drawn, self.n or 1
        if drawn < n:
            raise Refusal(400, f"best_of is {drawn}, must be at least n ({n})", param="best_of", code="invalid_value")
        if drawn > n and self.stream:
            message = f"best_of is {drawn}, and a stream has texts before the best is known: set it to n ({n})"
            raise Refusal(400, message, param="best_of", code="invalid_value")

    @property
    def prompt_likeliest(self) -> int | None:
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)

    @property
    def likeliest(self) -> int:
        return self.logprobs or 0

    @property
    def drawn(self) -> int:
        return self.best_of or self.n or 1


class ChatRequest(ApiRequest):
    """The body of POST /v1/chat/completions."""

    messages: list[Any] = pydantic.Field(min_length=1)
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=LIKELIEST)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    thinking_strategy: Any = None

    def check(self) -> None:
        super().check()
        if self.continue_final_message and self.add_generation_prompt is not False:
            message = (
                "continue_final_message needs add_generation_prompt = false: an answer would begin after the message"
            )
            raise Refusal(400, message, param="continue_final_message", code="invalid_value")
        if self.echo and self.stream and self.tools:
            message = "echo is not available in a stream with tools: leave it out"
            raise Refusal(400, message, param="echo", code="invalid_value")

    @property
    def answers(self) -> bool:
        return True

    @property
    def echoed(self) -> str:
        """The content of the last message, where it is the assistant's and `echo` asks for it before the answer."""
        last = self.messages[-1]
        content = last.get("content") if isinstance(last, dict) and last.get("role") == "assistant" else None
        if isinstance(content, list):  # of texts: others are refused before the answer
            content = "".join(part["text"] for part in content)
        return content or "" if self.echo else ""

    @property
    def longest(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().longest
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def likeliest(self) -> int:
        return self.top_logprobs or 0
