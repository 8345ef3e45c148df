"""Programs are compiled in a thread: the requests that need them wait, and others go on."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import jax
import pytest

from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.programs import compiler as compiler_module
from capibara.inference.engine.programs.compiler import Compiler, Task
from capibara.inference.engine.runner import step_rows
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.api import DecoderConfig

MODEL = api.build(DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32"))
SHORT, PREFIX = [5, 6, 7], [3, 9] * 20
GREEDY = Sampling(temperature=0.0, max_new_tokens=4)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: x * 3, jax.jit(MODEL.init)(jax.random.key(1)))


@pytest.fixture
def held(monkeypatch):
    """Holds every compilation in the compiler's thread until the event is set."""
    event = threading.Event()
    real = Compiler._next

    def following(self):
        task = real(self)
        return task and Task(task.key, lambda: (event.wait(20), task.compile()))

    monkeypatch.setattr(Compiler, "_next", following)
    monkeypatch.setattr(step_rows, "sizes_of", lambda slots: [1])
    yield event
    event.set()


def engine(params, **config):
    return Engine(MODEL, params, ByteVocabulary(), 256, EngineConfig(**{"slots": 4, "prefix_cache_mib": 0} | config))


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "not compiled within a minute"
        time.sleep(0.01)


def warm_up(one, beside=True):
    """In a thread, as a server does: the settings of these tests are of the main thread, and programs depend on them."""
    thread = threading.Thread(target=lambda: one.warm_up(background=beside))
    thread.start()
    thread.join()


@pytest.fixture
def threads():
    """The names of the threads that compile."""
    names = set()

    def record(event, *_, **__):
        if event.endswith("backend_compile_duration"):
            names.add(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(record)
    return names


@pytest.mark.parametrize(
    "prompt, options, slots",
    [
        ([4] * 200, {}, 5),  # longer than those that are compiled first
        (SHORT, {"likeliest": 3}, 6),
    ],
)
def test_a_request_waits_for_its_programs_and_others_go_on(params, held, prompt, options, slots, threads):
    want = engine(params).submit(prompt, GREEDY, **options).result().tokens
    one = engine(params, slots=slots)  # other programs than those above
    warm_up(one)
    threads.clear()
    with one.start():
        waiting = one.submit(prompt, GREEDY, **options)
        for _ in range(3):
            assert len(one.submit(SHORT, GREEDY).result().tokens) == 4
        assert not threads and one.load == (0, 1) and one.compiling > 1
        held.set()
        assert waiting.result().tokens == want
    assert threads == {"compiler"}


def test_a_step_of_few_rows_is_used_when_it_is_compiled(params, held):
    one = engine(params)
    warm_up(one)
    with one.start():
        first = one.submit(SHORT, GREEDY).result().tokens
        assert not one.core.runner.sizes
        held.set()
        wait_until(lambda: one.core.runner.sizes)
        wait_until(lambda: not one.compiling)
        assert one.submit(SHORT, GREEDY).result().tokens == first


def test_a_row_with_a_cached_prefix_waits_for_its_program(params, threads):
    want = [engine(params).submit(PREFIX + end, GREEDY).result().tokens for end in ([1], [2])]
    one = engine(params, prefix_cache_mib=16, slots=7)
    warm_up(one)
    threads.clear()
    with one.start():
        results = [one.submit(PREFIX + end, GREEDY).result() for end in ([1], [2])]
    assert [result.tokens for result in results] == want and results[1].cached_tokens == len(PREFIX)
    assert threads == {"compiler"}


def test_nothing_is_compiled_after_a_whole_warm_up(params, threads):
    """Whatever the lengths of prompts, and of what they share with earlier ones; a slot's pages hold what is shared."""
    want = engine(params).submit([8] * 150 + [1], GREEDY).result().tokens
    one = engine(params, page_size=32, prefix_cache_mib=16, slots=2)
    prefixes = one.core.prefill.prefixes
    warm_up(one, beside=False)
    threads.clear()
    with one.start():
        for shared, more in ((20, 9), (70, 1), (150, 40), (150, 1)):
            first = one.submit([8] * shared + [2], GREEDY).result()
            wait_until(lambda: (prefixes.find([8] * shared + [1]) or [0, 0])[1] >= shared)
            second = one.submit([8] * shared + [1] * more, GREEDY).result()
            assert second.cached_tokens >= shared and len(first.tokens) == len(second.tokens) == 4
        one.submit([5] * 200, GREEDY, likeliest=2).result()
    assert second.tokens == want and not threads


def test_nothing_is_compiled_before_the_first_request_without_warm_up(params, threads):
    one = engine(params, slots=8)
    threads.clear()
    with one.start():
        assert len(one.submit(SHORT, GREEDY).result().tokens) == 4
    assert threads == {"compiler"}


def test_what_a_request_waits_for_comes_first_and_an_error_ends_nothing():
    compiler, order, done = Compiler(), [], threading.Event()
    fails = lambda: order.append("wanted") or 1 / 0  # noqa: E731
    compiler.add(Task("later", lambda: order.append("later") or done.set()))
    assert compiler.is_compiled(Task("wanted", fails))  # by its first call, until the thread runs
    compiler._thread = threading.current_thread()
    assert not compiler.is_compiled(Task("wanted", fails))
    compiler._thread = None
    compiler.start()
    assert done.wait(10) and order == ["wanted", "later"]
    assert compiler.is_compiled(Task("wanted", fails))
    compiler.close()


def test_prompts_are_read_alone_until_the_program_for_both_is_compiled(params, held):
    one, rows = engine(params, slots=9), []
    warm_up(one)
    programs = one.core.prefill.programs
    one.core.prefill.programs = programs._replace(
        prefill=lambda params, batch: rows.append(len(batch["tokens"])) or programs.prefill(params, batch)
    )
    for expected in ([1, 1], [1, 1, 2]):
        streams = [one.submit([7 + i] * 9, GREEDY) for i in range(2)]
        one.core.compiler.start()
        one.run()
        assert all(len(stream.result().tokens) == 4 for stream in streams) and rows == expected
        held.set()
        wait_until(lambda: one.core.compiler.is_compiled(Task(("together", 2, 32, ()), lambda: None)))
    one.core.compiler.close()


def test_a_task_is_let_go_when_it_is_compiled():
    class Anything:
        pass

    held, compiler = Anything(), Compiler()
    alive = weakref.ref(held)
    compiler.start()
    compiler.add(Task("a", lambda held=held: None))
    del held
    wait_until(lambda: gc.collect() >= 0 and alive() is None)
    compiler.close()


def test_a_task_that_fails_is_logged_and_counts_as_compiled(monkeypatch):
    """Its call raises the error again, as a fault of its requests."""
    compiler, lines = Compiler(), []
    monkeypatch.setattr(compiler_module._log, "warning", lambda text, *args: lines.append(text % args))
    task = Task("a", lambda: 1 / 0)
    compiler.start()
    wait_until(lambda: compiler.is_compiled(task))
    compiler.close()
    assert lines == ["a program for a does not compile ahead of its requests: ZeroDivisionError('division by zero')"]
