"""Runs tasks of EleutherAI's lm-evaluation-harness on our models (package lm-eval, extra `harness`)."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from capibara.config import configurable
from capibara.core import extras
from capibara.core.fields import did_you_mean
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.evaluation.scoring import Pair
from capibara.evaluation.subject import Subject
from capibara.inference.sampling import sentinels
from capibara.inference.sampling.sampling import Sampling

extras.require("lm_eval", extra="harness", why="--harness")
from lm_eval import evaluator, utils  # noqa: E402
from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.models.utils import normalize_gen_kwargs  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from tqdm import tqdm  # noqa: E402

_AHEAD = 4  # queued requests per slot
_NEW_TOKENS = 256  # the default of a task
_SEED = 1234  # the harness's default
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # in the harness's order
_DRAWN = ("top_k", "top_p", "min_p")  # without effect on a greedy text
# Options of transformers' `generate`, to which lm-eval's HFLM passes what it does not know, at values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits", "output_scores", "output_logits"), (False,)),
    "guidance_scale": (1,),
}
_WITHOUT_EFFECT = ("use_cache", "length_penalty", "early_stopping")  # the last two are for beams, of which there is one


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Harness:
    """Options of the harness.

    Attributes:
      chat: put prompts into the model's chat template.
      system: the system message of the chat; None: none.
      num_fewshot: examples before each question; None: the task's own number.
      unsafe_code: run tasks that execute a model's programs (with the harness's own code, without our sandbox).
    """

    chat: bool = False
    system: str | None = None
    num_fewshot: int | None = None
    unsafe_code: bool = False


class CapibaraLM(TemplateLM):
    """Implements the harness's model interface for a subject.

    Args:
      subject: the model.
      options: options of prompts.
    """

    def __init__(self, subject: Subject, options: Harness = Harness()):
        super().__init__()
        self._subject, self._options, self._vocabulary = subject, options, subject.vocabulary
        dataset = subject.trainer.dataset
        self.max_length = dataset.length
        self._reads = dataset.encoder_length
        self.backend = "causal" if self._reads is None else "seq2seq"
        self._owners: Sequence[Any] = ()  # the harness's requests of the next call of `_loglikelihood_tokens`

    @property
    def eot_token_id(self) -> int:
        return self._vocabulary.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self._vocabulary.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self._vocabulary.fingerprint().replace(":", "-")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._subject.chat.template.fingerprint() if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders a conversation; without a generation prompt, the end of its last message is omitted."""
        chat = self._subject.chat
        conversation = Conversation(list(chat_history))
        text = chat.template.render(
            conversation, "the harness's prompt", add_generation_prompt=add_generation_prompt, guard=False
        ).text
        last = chat_history[-1]["content"].rstrip()
        return text if add_generation_prompt else text[: text.rindex(last) + len(last)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Encodes a text, including special tokens in it; begins it as the tokenizer does, if that is missing and wanted."""
        if self._reads is not None:
            read = sentinels.ids_of(string, self._vocabulary)
            return read[:-1] if add_special_tokens is False else read
        ids, begin = self._vocabulary.encode(string), list(self._vocabulary.begin_ids)
        begins = not self._options.chat  # a chat template writes the beginning token
        with_begin = begins if add_special_tokens is None else add_special_tokens
        return [*begin, *ids] if with_begin and ids[: len(begin)] != begin else ids

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations after their contexts."""
        for request in requests:
            with _named(request):
                if not request.args[1]:
                    raise UserError("its continuation is empty, must have at least one token: correct the task's file")
        self._owners = requests
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        prefix: list[int] = [self.prefix_token_id]
        cut: list[Any] = []
        pairs = [Pair(context or prefix, continuation) for _, context, continuation in requests]
        for owner, pair in zip(self._owners, pairs, strict=True):
            with _named(owner):
                self._subject.scorer.check(pair)
            room = self.max_length + 1 - len(pair.continuation) if self._reads is None else self._reads
            cut += [owner] if len(pair.context) > room else []
        _tell_cut(cut, len(pairs))
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="Scoring") as bar:
            scores = self._subject.scorer(pairs, lambda count: bar.update(count - bar.n))
        result = [(score.log_probability, score.greedy) for score in scores]
        for request, item in zip([request for request, _, _ in requests], result):
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, item)
        return result

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts; each token is predicted from as many tokens before it as fit a row."""
        windows: list[tuple[int, Any]] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            rolled = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(number, (None, *utils.make_disjoint_window(window))) for window in rolled]
        self._owners = [requests[number] for number, _ in windows]
        scores = self._loglikelihood_tokens([window for _, window in windows], disable_tqdm=disable_tqdm)
        sums = [0.0] * len(requests)
        for (number, _), (log_probability, _) in zip(windows, scores):
            sums[number] += log_probability
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates texts by `sampling_of`; a repeated request gets another seed."""
        arguments = [request.args for request in requests]
        counts: collections.Counter = collections.Counter()
        samplings = []
        for request, (context, kwargs) in zip(requests, arguments):
            same = (context, repr(kwargs))
            with _named(request):
                samplings.append(self._sampling(kwargs, seed=counts[same]))
            counts[same] += 1
        self._tell_default([request for request in requests if _limit_in(request.args[1]) is None])
        texts: list[str] = []
        cut: list[Any] = []
        created = self._subject.in_turns(list(zip(requests, samplings)), self._generated, self._subject.slots)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Generating") as bar:
            for request, (text, whole) in zip(requests, created, strict=True):
                texts.append(text)
                cut += [] if whole else [request]
                self.cache_hook.add_partial("generate_until", request.args, text)
                bar.update()
        _tell_cut(cut, len(requests))
        return texts

    def _generated(self, requests: Sequence[tuple[Any, Sampling]]) -> Iterator[tuple[str, bool]]:
        """Yields the text of each request, and whether its prompt was not cut, while later ones are generated."""
        waiting: collections.deque = collections.deque()
        left = iter(requests)
        for _ in requests:
            for request, sampling in itertools.islice(left, max(_AHEAD * self._subject.slots - len(waiting), 0)):
                with _named(request):
                    waiting.append(self._asked(request.args[0], sampling))
            stream, whole = waiting.popleft()
            yield stream.result().text, whole

    def _asked(self, context: str, sampling: Sampling) -> tuple[Any, bool]:
        """The stream of a text, and whether the prompt was not cut: its beginning is, if a row has no room for both."""
        engine, ends = self._subject.engine, self._subject.chat.ends if self._options.chat else ()
        if self._reads is not None:
            return engine.submit(context, sampling), len(self.tok_encode(context)) <= self._reads
        room, ids = self.max_length - sampling.max_new_tokens, self.tok_encode(context)
        return engine.submit(ids[-room:] or [self.prefix_token_id], sampling, ends=ends), len(ids) <= room

    def _sampling(self, kwargs: dict[str, Any], seed: int = 0) -> Sampling:
        sampling = sampling_of(kwargs, self._default_tokens, seed)
        if self._reads is None and sampling.max_new_tokens >= self.max_length:
            name = _limit_in(kwargs)
            raise UserError(
                f"its {name} is {sampling.max_new_tokens}, but prompt and answer must fit Dataset.length "
                f"({self.max_length}): raise that, or lower the task's {name}"
            )
        return sampling

    def _tell_default(self, requests: Sequence[object]) -> None:
        if requests and self._default_tokens < _NEW_TOKENS:
            logging.getLogger(__name__).warning(
                "%d texts end after %d tokens, half of a row, because their tasks name no limit and the harness's %d do not "
                "fit beside a prompt; the first is %s: raise Dataset.length, or set the task's max_gen_toks",
                *(len(requests), self._default_tokens, _NEW_TOKENS, _where(requests[0])),
            )

    @property
    def _default_tokens(self) -> int:
        """The most tokens of a text whose task names no limit: the harness's, or half a row."""
        return _NEW_TOKENS if self._reads is not None else max(min(_NEW_TOKENS, self.max_length // 2), 1)


def sampling_of(kwargs: Mapping[str, object], default_tokens: int, seed: int = 0) -> Sampling:
    """A task's `generation_kwargs`, as the harness's own normaliser reads them (lm_eval.models.utils, 0.4.13).

    A temperature above 0 draws texts, with or without `do_sample`. Without `top_k` all tokens may be drawn, as with vLLM.

    Args:
      kwargs: of the task.
      default_tokens: the most tokens, if the task names no limit.
      seed: of the text.

    Raises:
      UserError: an option that changes the text and that we do not have, or a value out of range.
    """
    try:
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(kwargs), default_tokens))
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"its generation_kwargs {dict(kwargs)} have a limit or a temperature that is no number ({error}): correct it"
        ) from None
    until, draws = options.pop("until"), options.pop("do_sample")
    tokens, temperature = options.pop("max_gen_toks"), float(options.pop("temperature", 0))
    if not all(part is None or isinstance(part, str) for part in until):
        raise UserError(f"its until is {until}, must be strings: correct it")
    if not isinstance(draws, bool):
        raise UserError(f"its do_sample is {draws!r}, must be true or false: correct it")
    if draws and temperature <= 0:
        raise UserError("its do_sample is true, but its temperature is 0 or missing: set it, or do_sample: false")
    if tokens < 1:
        raise UserError(f"its {_limit_in(kwargs)} is {tokens}, must be at least 1: raise it")
    fields = _fields({name: value for name, value in options.items() if value is not None})
    if not draws:
        fields = {name: value for name, value in fields.items() if name not in _DRAWN}
    try:
        return Sampling(
            max_new_tokens=tokens,
            temperature=temperature if draws else 0.0,
            seed=seed,
            stop=tuple(part for part in until if part),
            **fields,
        )
    except UserError as error:
        raise UserError(f"its {str(error).replace('Sampling.', '')}") from None


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    """The other fields of Sampling in normalised options, without those that change nothing."""
    fields: dict[str, Any] = {}
    for name, value in options.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name in _WITHOUT_EFFECT:
            continue
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise UserError(
                    f"its {name} is {value!r}, which capibara does not have: remove it, or set it to {_NEUTRAL[name][0]}"
                )
        elif name not in (*_DRAWN, "repetition_penalty"):
            raise UserError(f"its {name} ({value!r}) is no option of generation that capibara has: remove it")
        elif not number or name == "top_k" and value != int(value):
            raise UserError(f"its {name} is {value!r}, must be a number: correct it")
        elif name == "top_k":
            fields |= {name: int(value)} if value not in (0, -1) else {}  # transformers' and vLLM's "all"
        else:
            fields[name] = float(value)
    return fields


def _limit_in(kwargs: Mapping[str, object]) -> str | None:
    """The name of the limit that counts."""
    return next((name for name in _LIMITS if kwargs.get(name) is not None), None)


def evaluate(
    subject: Subject, tasks: Sequence[str], options: Harness, path: str | None = None, limit: int | None = None
) -> dict[str, Any]:
    """Runs tasks of the harness; returns its results dict with the model's description under "capibara".

    Args:
      subject: the model.
      tasks: names of the tasks.
      options: how they are asked.
      path: a folder of YAML tasks in addition to the harness's own; None: none.
      limit: the largest number of documents of a task.

    Raises:
      UserError: a task is unknown, or its data is not available.
    """
    if path is not None and not os.path.isdir(path):
        raise UserError(f"--harness_path={path} does not exist: name a folder of YAML tasks")
    manager = _manager(tasks, path)
    if options.chat:
        _ = subject.chat  # raises here if there is none
    with _quiet(), _data_explained(tasks):
        result = evaluator.simple_evaluate(
            CapibaraLM(subject, options),
            tasks=list(tasks),
            num_fewshot=options.num_fewshot,
            limit=limit,
            task_manager=manager,
            system_instruction=options.system,
            apply_chat_template=options.chat,
            log_samples=False,
            torch_random_seed=None,
            fewshot_random_seed=_SEED,
            confirm_run_unsafe_code=options.unsafe_code,
        )
    return {"capibara": subject.about | {"harness": dataclasses.asdict(options)}, **result}


def _manager(tasks: Sequence[str], path: str | None) -> TaskManager:
    """The harness's task manager; indexes the harness's thousands of tasks only if one of them is requested."""
    if path is not None:
        manager = TaskManager(include_path=path, include_defaults=False)
        if all(manager.match_tasks([name]) for name in tasks):
            return manager
    manager = TaskManager(include_path=path)
    for name in tasks:
        if not manager.match_tasks([name]):
            where = "" if path is None else f" nor in {path}"
            raise UserError(f"--harness={name} is no task of lm-eval{where}{did_you_mean(name, manager.all_tasks)}")
    return manager


@contextlib.contextmanager
def _named(request: object) -> Iterator[None]:
    """A context that adds the task and document to a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{_where(request)}: {error}") from None


def _where(request: Any) -> str:
    return f"--harness={request.task_name}, document {request.doc_id}"


def _tell_cut(requests: Sequence[object], count: int) -> None:
    if requests:
        logging.getLogger(__name__).warning(
            "%d of %d prompts were cut because they do not fit a row; the first is %s: raise Dataset.length",
            *(len(requests), count, _where(requests[0])),
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context that suppresses the harness's progress messages."""
    log = logging.getLogger("lm_eval")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def _data_explained(tasks: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, ConnectionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--harness={','.join(tasks)}: its data is not available ({reason}): name tasks whose files are on this machine, "
            "or run where Hugging Face's hub can be reached"
        ) from error


def table(results: dict[str, Any]) -> list[str]:
    """The results as the harness prints them."""
    lines = utils.make_table(results).rstrip().splitlines()
    return lines + (utils.make_table(results, "groups").rstrip().splitlines() if results.get("groups") else [])
