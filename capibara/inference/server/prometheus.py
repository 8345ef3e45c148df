"""The server's metrics for Prometheus."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from capibara.inference.engine.requests.stream import Completion, Finish
from capibara.inference.server.service.load import Load

_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class ServingMetrics:
    """Counts requests and texts; `load` returns what the server is busy with."""

    def __init__(self, load: Callable[[], Load]):
        self._registry = CollectorRegistry()
        common: dict[str, Any] = {"namespace": "capibara", "registry": self._registry}
        self._requests = Counter("requests", "Requests, by path and HTTP status.", ["path", "status"], **common)
        self._texts = Counter("texts", "Texts, by finish reason.", ["finish"], **common)
        self._prompt = Counter("prompt_tokens", "Prompt tokens.", **common)
        self._read = Counter(
            "read_tokens", "Tokens of texts that are not continued: of embeddings and scores.", **common
        )
        self._cached = Counter("cached_tokens", "Prompt tokens found in the prefix cache.", **common)
        self._generated = Counter("generated_tokens", "Generated tokens.", **common)
        self._first = Histogram(
            "time_to_first_token_seconds", "Time from request to first token.", buckets=_FIRST_S, **common
        )
        self._each = Histogram(
            "time_per_token_seconds", "Mean time between tokens of a text.", buckets=_TOKEN_S, **common
        )
        gauges = (
            ("queue_depth", "Texts that wait for a slot."),
            ("slots_busy", "Slots in use."),
            ("slots", "Slots."),
            ("pages", "Pages of the cache; 0: it is not paged."),
            ("pages_busy", "Pages in use."),
            ("compiling", "Programs that are still to be compiled; requests are slower meanwhile."),
            ("adapters", "Adapters that requests can name."),
        )
        for name, about in gauges:
            Gauge(name, about, **common).set_function(functools.partial(_of_load, load, name))
        self._registry.register(_Preempted(load))

    def request(self, path: str, status: int) -> None:
        """Counts a request when its answer is complete, or begins to stream."""
        self._requests.labels(path, status).inc()

    def text(self, completion: Completion) -> None:
        """Counts a finished text."""
        tokens = len(completion.tokens)
        self._texts.labels(str(completion.finish)).inc()
        self._prompt.inc(completion.prompt_tokens)
        self._cached.inc(completion.cached_tokens)
        self._generated.inc(tokens)
        if tokens and completion.finish is not Finish.CANCELLED:
            self._first.observe(completion.waited_s)
        if tokens > 1:
            self._each.observe((completion.elapsed_s - completion.waited_s) / (tokens - 1))

    def read(self, tokens: int) -> None:
        """Counts the tokens of texts that are not continued."""
        self._read.inc(tokens)

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Preempted(Collector):
    """Exports the engine's own counter of preempted texts."""

    def __init__(self, load: Callable[[], Load]):
        self._load = load

    def collect(self) -> Iterator[Metric]:
        about, count = "Texts preempted for lack of pages; they return to the queue.", self._load().preempted
        yield CounterMetricFamily("capibara_preempted_texts", about, value=count)
        yield CounterMetricFamily("capibara_put_back_texts", "Old name of capibara_preempted_texts.", value=count)


def _of_load(load: Callable[[], Load], name: str) -> float:
    return getattr(load(), name)
