"""Many concurrent requests give the same texts as alone; they stop where they should, and stream whole characters."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import queue
import threading
import types

import jax
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference import speed
from capibara.inference.engine.cache.prefix import PrefixCache
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.requests.stream import Piece
from capibara.inference.engine.runner import decode, decode_schedule
from capibara.inference.engine.runner.next_tokens import next_tokens
from capibara.inference.interactive import files
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.sampling.text import TextStream
from capibara.models import api
from capibara.models.api import DecoderConfig, Lora
from capibara.models.parts.moe import Moe
from capibara.storage import outputs

MODEL = api.build(DecoderConfig(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32"))
VOCABULARY = ByteVocabulary()
LENGTH = 64
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)


@functools.cache
def params():
    # Large weights, so that one token is far likelier than the others and texts do not agree by chance.
    return jax.tree.map(lambda x: x * 3, jax.jit(MODEL.init)(jax.random.key(1)))


def engine(slots=3, prefix_cache_mib=0, **config):
    return Engine(
        MODEL, params(), VOCABULARY, LENGTH, EngineConfig(slots=slots, prefix_cache_mib=prefix_cache_mib, **config)
    )


REQUESTS = [
    ("def f", GREEDY),
    ("a longer prompt, of many words", Sampling(temperature=1.5, seed=3, max_new_tokens=20)),
    ("", Sampling(temperature=1.0, top_k=5, seed=4, max_new_tokens=3)),
    ("x", Sampling(temperature=1.2, top_p=0.8, seed=5, max_new_tokens=9)),
    ("import numpy", Sampling(temperature=0.9, min_p=0.05, seed=6, max_new_tokens=1)),
    ("class A", Sampling(temperature=0.7, repetition_penalty=1.5, seed=7, max_new_tokens=15)),
    ("def f", Sampling(temperature=1.5, seed=8, max_new_tokens=12)),
]


@functools.cache
def alone():
    return [engine(slots=3).submit(*request).result().tokens for request in REQUESTS]


@pytest.mark.parametrize("order", [range(7), [6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 2, 5, 1, 4]], ids=str)
def test_a_text_does_not_depend_on_what_else_there_is(order):
    one, streams = engine(), {}
    for turn, number in enumerate(order):
        streams[number] = one.submit(*REQUESTS[number])
        for _ in range(turn % 3):
            one.step()
    assert [streams[number].result().tokens for number in range(7)] == alone()
    assert len({tuple(tokens) for tokens in alone()}) == 7


@pytest.mark.parametrize(
    "pool", [{}, pytest.param({"page_size": 8, "pages": 20}, marks=pytest.mark.heavy)], ids=["rows", "pages"]
)
def test_texts_do_not_depend_on_how_many_tokens_a_program_gives(pool):
    """Includes penalties, seeds, stop strings and ends within the tokens of one program."""
    stop = dataclasses.replace(REQUESTS[1][1], stop=(VOCABULARY.decode(alone()[1][5:7]),))
    ends = alone()[0][5:6]
    found, steps = {}, {}
    for most in (1, 8):
        one = engine(decode_steps=most, **pool)
        streams = [one.submit(*request, likeliest=2) for request in REQUESTS]
        streams += [one.submit(REQUESTS[1][0], stop), one.submit(*REQUESTS[0], ends=ends)]
        results = [stream.result() for stream in streams]
        found[most], steps[most] = [(r.tokens, r.text, r.finish) for r in results], one.statistics.steps
        named = [[piece.likeliest[0][0] for piece in r.pieces if piece.likeliest] for r in results]
        assert named[0] == alone()[0]  # greedy: the likeliest of each
        assert one.core.runner.programs.step._cache_size() <= 2  # however many tokens: with and without likeliest
    assert found[1] == found[8]
    assert [tokens for tokens, _, _ in found[8][:7]] == alone()
    assert [finish for *_, finish in found[8][7:]] == ["stop", "stop"]
    assert steps[8] < steps[1]


def test_a_program_gives_no_row_more_than_its_last_token():
    one = engine(decode_steps=8)
    given = []
    step = one.core.runner.programs.step
    one.core.runner.programs = one.core.runner.programs._replace(step=lambda *a: given.append(int(a[4])) or step(*a))
    long = one.submit("a" * (LENGTH - 14), dataclasses.replace(GREEDY, max_new_tokens=30))  # its slot ends first
    short = one.submit("b", dataclasses.replace(GREEDY, max_new_tokens=6))
    assert len(short.result().tokens) == 6
    assert given[0] == 5  # one came with the prompt
    assert len(long.result().tokens) == 14 and sum(given) == 13
    assert one.statistics.tokens == 13 + 1 + 6
    thinking = Sampling(temperature=0.0, max_new_tokens=20, thinking_tokens=4, thinking_tags=("<", ">>"))
    given.clear()
    one.submit("c <", thinking).result()
    # The rest of the thought, the two tokens of its end one by one, and then no more than another thought might have.
    assert given == [3, 1, 1, 4, 4, 4, 2]


def test_what_is_done_together_does_not_depend_on_the_clock_unless_somebody_reads_along(monkeypatch):
    """Processes that share an engine must run the same programs, and so must a resumed run."""
    now_s, given = [0.0], []
    monkeypatch.setattr(decode_schedule.time, "monotonic", lambda: now_s[0])

    def counts(streaming):
        one = engine(slots=2)
        step, one.core.schedule.streaming = one.core.runner.programs.step, streaming

        def slowly(*args):
            given.append(int(args[4]))
            now_s[0] += 0.06 * given[-1]
            return step(*args)

        one.core.runner.programs = one.core.runner.programs._replace(step=slowly)
        given.clear()
        texts = [
            one.submit(p, dataclasses.replace(GREEDY, max_new_tokens=n)) for p, n in (("a", 14), ("b", 9), ("c", 5))
        ]
        return [len(text.result().tokens) for text in texts], list(given)

    # Two rows to the end of the second, 1 + 4 + 4; then the first and the third, 1 + 4; then the last one of the first.
    assert counts(False) == ([14, 9, 5], [4, 4, 4, 1])
    lengths, given_then = counts(True)  # the first is timed, and more than one token would take more than 0.1 s
    assert lengths == [14, 9, 5] and set(given_then) == {1}


def test_weights_are_not_converted_in_front_of_the_steps():
    """For all parameters at once: a second copy, of four bytes per element."""
    model = api.build(dataclasses.replace(MODEL.config, dtype="bfloat16"))
    one = Engine(model, params(), VOCABULARY, LENGTH, EngineConfig(slots=1, decode_steps=4))
    given = (
        one.core.params.current,
        one.core.runner.state,
        one.core.runner.settings,
        next_tokens([], 1, 384)[0],
        np.int32(1),
        None,
        0,
    )
    memory = one.core.runner.programs.step.lower(*given).compile().memory_analysis()
    assert memory.temp_size_in_bytes < sum(x.nbytes for x in jax.tree.leaves(one.core.params.current))


def test_a_row_waits_for_no_more_than_one_token_while_a_prompt_is_read():
    one = engine(slots=2, decode_steps=8, prefill_tokens=32)
    given = []
    step = one.core.runner.programs.step
    one.core.runner.programs = one.core.runner.programs._replace(step=lambda *a: given.append(int(a[4])) or step(*a))
    one.submit("x", dataclasses.replace(GREEDY, max_new_tokens=40))
    one.step()
    one.step()
    assert given == [8, 8]
    one.submit("y" * 60, GREEDY)  # two parts
    one.step()
    assert given == [8, 8, 1] and one.core.prefill.pending
    one.run()
    assert max(given[3:]) == 8


def test_streams_are_read_from_many_threads():
    got = {}
    with engine().start() as one:

        def ask(number):
            got[number] = [piece.token for piece in one.submit(*REQUESTS[number]) if piece.token is not None]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [got[number] for number in range(7)] == alone()
    with pytest.raises(RuntimeError, match="closed"):
        one.submit("a")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_waits_when_its_thread_fails_is_told(monkeypatch):
    """Includes requests whose slot is free already: the lost token is their last."""
    one, ended = engine(slots=2), queue.SimpleQueue()
    streams = [one.submit(REQUESTS[1][0], Sampling(max_new_tokens=1)), one.submit(*REQUESTS[0])]
    streams += [one.submit(*REQUESTS[number]) for number in (2, 3, 4, 5, 6, 0)]  # these have none yet
    for stream in streams:
        stream.forward(lambda item, stream=stream: None if isinstance(item, Piece) else ended.put((stream, item)))
    monkeypatch.setattr(decode.jax, "device_get", lambda _: 1 / 0)
    one.start()
    found = [ended.get(timeout=60) for _ in streams]
    assert {id(stream) for stream, _ in found} == {id(stream) for stream in streams}
    assert all(isinstance(error, ZeroDivisionError) for _, error in found) and one.failed
    with pytest.raises(RuntimeError, match="closed"):
        one.submit("a")
    one.close()  # its thread says why it ended: in here


def test_log_probabilities_are_those_of_the_model():
    result = engine().submit("def f", dataclasses.replace(REQUESTS[1][1], max_new_tokens=6), likeliest=3).result()
    ids = [VOCABULARY.bos_id, *VOCABULARY.encode("def f"), *result.tokens]
    row = np.array([ids], np.int32)
    batch = {"tokens": row, "positions": np.arange(row.size, dtype=np.int32)[None], "segment_ids": np.ones_like(row)}
    logits = np.asarray(jax.jit(MODEL.logits)(params(), batch))[0, :, : VOCABULARY.size]
    want = np.asarray(jax.nn.log_softmax(logits, axis=-1))[-1 - len(result.tokens) : -1]
    for step, piece in enumerate(piece for piece in result.pieces if piece.token is not None):
        assert piece.log_probability == pytest.approx(want[step, piece.token], abs=2e-4)
        best = np.argsort(-want[step])[:3]
        assert [token for token, _ in piece.likeliest] == best.tolist()
        np.testing.assert_allclose([value for _, value in piece.likeliest], want[step, best], atol=2e-4)


def test_experts_that_choose_cannot_generate():
    mixture = dataclasses.replace(MODEL.config, moe=Moe(num_experts=4, routing="expert_choice"))
    with pytest.raises(UserError, match="Moe.routing is 'expert_choice'"):
        Engine(api.build(mixture), {}, VOCABULARY, LENGTH)


def test_a_cancelled_request_leaves_its_slot_to_the_next():
    one = engine(slots=1)
    first, second, third = (one.submit(*REQUESTS[number]) for number in (1, 0, 3))
    pieces = iter(first)
    next(pieces), next(pieces)
    first.cancel()
    second.cancel()  # still waiting
    assert first.result().finish == "cancelled" and 2 <= len(first.result().tokens) < 20
    assert second.result().finish == "cancelled" and second.result().tokens == []
    assert third.result().tokens == alone()[3] and third.result().finish == "length"


def test_a_stop_string_ends_the_text_before_it():
    whole = engine().submit(*REQUESTS[0]).result()
    assert len(whole.text) > 8
    stop = whole.text[4:7]  # of several tokens: the vocabulary's are bytes
    request = dataclasses.replace(GREEDY, stop=("never", stop))
    cut = engine().submit("def f", request).result()
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish == "stop"
    assert "".join(piece.text for piece in cut.pieces) == cut.text


def test_a_token_ends_the_text_too():
    whole = engine().submit(*REQUESTS[0]).result()
    end = whole.tokens[5]
    cut = engine().submit("def f", GREEDY, ends=[end]).result()
    assert cut.tokens == whole.tokens[: whole.tokens.index(end)] and cut.finish == "stop"


def test_every_end_token_of_the_vocabulary_ends_a_text():
    whole = engine().submit(*REQUESTS[0]).result()
    end = whole.tokens[5]

    class Ending(ByteVocabulary):
        end_ids = (VOCABULARY.eos_id, end)

    one = Engine(MODEL, params(), Ending(), LENGTH, EngineConfig(slots=3, prefix_cache_mib=0))
    assert one.submit("def f", GREEDY).result().tokens == whole.tokens[: whole.tokens.index(end)]


def test_a_full_row_ends_or_moves_on():
    prompt, many = list(range(10, 10 + LENGTH - 4)), dataclasses.replace(GREEDY, max_new_tokens=9)
    ended = engine().submit(prompt, many).result()
    assert (ended.finish, len(ended.tokens)) == ("length", 5)
    moved = engine(when_full="slide").submit(prompt, many).result()
    assert len(moved.tokens) == 9 and moved.tokens[:5] == ended.tokens
    with pytest.raises(UserError, match="65 tokens, must have at most 64"):
        engine().submit([5] * 65)


@pytest.mark.parametrize(
    "layer_pattern", [pytest.param(("global",), marks=pytest.mark.heavy), ("local", "global")], ids=str
)
def test_a_prompt_that_begins_like_another_is_read_from_there(layer_pattern):
    window = 24 if "local" in layer_pattern else None
    model = api.build(dataclasses.replace(MODEL.config, layer_pattern=layer_pattern, window=window))
    make = functools.partial(Engine, model, params(), VOCABULARY, LENGTH)
    begun, plain = make(EngineConfig(slots=2)), make(EngineConfig(slots=2, prefix_cache_mib=0))
    system = "a system prompt that all share. "
    first = begun.submit(system, GREEDY).result()
    ids = [VOCABULARY.bos_id, *VOCABULARY.encode(system)]
    turn = [*ids, *first.tokens, *VOCABULARY.encode(" next")]  # the conversation goes on
    for prompt, cached in ((turn, len(ids) + len(first.tokens) - 1), ([*ids, 70, 71, 72], len(ids)), ([70, *ids], 0)):
        result = begun.submit(prompt, GREEDY).result()
        assert result.cached_tokens == cached
        assert result.tokens == plain.submit(prompt, GREEDY).result().tokens


def test_the_prefix_cache_keeps_to_its_bytes():
    row = {"key": np.zeros(1000, np.float32)}
    kept = PrefixCache(9000, None, shortest=2)
    for number in range(3):
        kept.keep([number, 1, 2, 3], row)
    assert kept.find([0, 1, 2, 3, 4]) is None and kept.find([1, 1, 2, 9])[1] == 3
    kept.keep([5, 1, 2, 3], row)
    assert kept.find([2, 1, 2, 3]) is None and kept.find([1, 1, 2, 3])[1] == 3  # the one used last stays


def test_a_row_that_an_end_token_ended_at_its_window_is_not_cut():
    model = api.build(dataclasses.replace(MODEL.config, num_layers=2, layer_pattern=("local",), window=32))
    make = functools.partial(Engine, model, params(), VOCABULARY, LENGTH)
    one, plain = make(EngineConfig(slots=1)), make(EngineConfig(slots=1, prefix_cache_mib=0))
    prompt = list(range(10, 34))
    drawn = Sampling(temperature=1.0, seed=1, max_new_tokens=20)
    tokens = plain.submit(prompt, drawn).result().tokens
    assert tokens[8] not in tokens[:8]
    assert one.submit(prompt, drawn, ends=tokens[8:9]).result().tokens == tokens[:8]  # 32 in all; its end is read too
    other = [*prompt, *tokens[:4], 70, 71]
    found, want = one.submit(other, GREEDY).result(), plain.submit(other, GREEDY).result()
    np.testing.assert_allclose(
        *([p.log_probability for p in r.pieces if p.token is not None] for r in (found, want)), atol=1e-4
    )
    assert found.tokens == want.tokens and found.cached_tokens == len(prompt)


@pytest.mark.parametrize("read", [30, 60])  # fewer than a window, and more
@pytest.mark.parametrize("end, one_by_one", [(0, False), (1, False), (1, True), (5, False), (5, True), (14, False)])
def test_what_was_read_beyond_an_end_is_taken_back(read, end, one_by_one):
    """A windowed layer keeps only its last positions: they must still hold what the next turn attends to."""
    model = api.build(dataclasses.replace(MODEL.config, num_layers=2, layer_pattern=("local",), window=32))
    make = functools.partial(Engine, model, params(), VOCABULARY, 96)
    config = EngineConfig(slots=1, decode_steps=8)
    one, plain = make(config), make(dataclasses.replace(config, prefix_cache_mib=0))
    prompt, drawn = list(range(10, 10 + read)), Sampling(temperature=1.0, seed=1, max_new_tokens=40)
    tokens = plain.submit(prompt, drawn).result().tokens
    assert tokens[end] not in tokens[:end]
    if one_by_one:  # up to the end, which nobody has seen when eight more are asked for
        most, counts = one.core.schedule.tokens, itertools.chain([1] * end, itertools.repeat(8))
        one.core.schedule.tokens = lambda requests, allowed: min(most(requests, allowed), next(counts))
    assert one.submit(prompt, drawn, ends=tokens[end : end + 1]).result().tokens == tokens[:end]
    turn = [*prompt, *tokens[:end], 70, 71]
    found, want = one.submit(turn, GREEDY).result(), plain.submit(turn, GREEDY).result()
    assert found.cached_tokens == len(prompt) + end and found.tokens == want.tokens
    np.testing.assert_allclose(
        *([p.log_probability for p in r.pieces if p.token is not None] for r in (found, want)), atol=1e-4
    )


def test_a_thought_has_no_more_tokens_than_its_budget():
    tags = ("<", ">")
    thinking = Sampling(temperature=1.0, seed=1, max_new_tokens=30, thinking_tokens=7, thinking_tags=tags)
    for prompt in ("question <", "question <old> <"):
        text = engine().submit(prompt, thinking).result().tokens
        closed = text.index(VOCABULARY.encode(">")[0])
        assert closed <= 7 and len(text) == 30
    free = engine().submit("question", thinking).result().tokens
    assert free == engine().submit("question", dataclasses.replace(thinking, thinking_tokens=None)).result().tokens
    # A thought that begins in the text: some character of it is taken for the tag.
    begins = next(i for i, token in enumerate(free[:20]) if 3 <= token < 131 and token not in free[:i])
    again = dataclasses.replace(thinking, thinking_tags=(VOCABULARY.decode([free[begins]]), "</t>"))
    text = engine().submit("question", again).result().tokens
    assert text[: begins + 8] == free[: begins + 8]
    assert text[begins + 8 : begins + 12] == VOCABULARY.encode("</t>")


def test_characters_come_whole_and_stop_strings_never():
    text = "naïve 🙂👩‍🚀 end"
    stream = TextStream(VOCABULARY)
    pieces = [stream.feed(token) for token in VOCABULARY.encode(text)]
    assert "".join(pieces) + stream.close() == text and "\ufffd" not in "".join(pieces)
    assert "🙂" in pieces and len(pieces) == len(text.encode())
    cut = TextStream(VOCABULARY)
    got = [cut.feed(token) for token in VOCABULARY.encode(text)[:8]]
    assert "".join(got) + cut.close() == "naïve \ufffd"
    stream = TextStream(VOCABULARY, stop=("</end>", "###"))
    got = "".join(stream.feed(token) for token in VOCABULARY.encode("a </e> ## b</end> c"))
    assert got + stream.close() == "a </e> ## b" and stream.stopped
    stream = TextStream(VOCABULARY, stop=("</end>",))
    assert "".join(stream.feed(token) for token in VOCABULARY.encode("a </en")) == "a " and stream.close() == "</en"


def test_a_file_of_prompts_goes_on_where_it_was_stopped(tmp_path):
    lines = [
        {"prompt": prompt, "id": number, "max_new_tokens": 4 + number} for number, (prompt, _) in enumerate(REQUESTS)
    ]
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = files.read_prompts(str(path), GREEDY)
    assert list(files.complete(engine(), prompts, str(out))) == list(range(8))
    whole = out.read_text()
    found = [json.loads(line) for line in whole.splitlines()]
    assert [(line["id"], line["prompt"]) for line in found] == [(line["id"], line["prompt"]) for line in lines]
    assert found[0]["text"] == engine().submit("def f", prompts[0].sampling).result().text
    out.write_text("".join(whole.splitlines(keepends=True)[:3]) + '{"prompt": "cut o')
    assert list(files.complete(engine(), prompts, str(out))) == [3, 4, 5, 6, 7]
    assert out.read_text() == whole
    out.write_text(whole[: whole.index("}") + 1])
    assert list(files.complete(engine(), prompts, str(out)))[0] == 0 and out.read_text() == whole
    with pytest.raises(UserError, match="line 1 has another prompt"):
        list(files.complete(engine(), prompts[1:], str(out)))
    other = [dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, seed=1)) for one in prompts]
    with pytest.raises(UserError, match="line 1 has another sampling"):
        list(files.complete(engine(), other, str(out)))
    with pytest.raises(UserError, match="line 1 has another made_by"):
        list(files.complete(engine(), prompts, str(out), made_by={"step": 3}))
    with open(out, "a") as other:
        outputs.lock(other, "of another process")
        with pytest.raises(UserError, match="--out=.*out.jsonl is being written by another process"):
            next(files.complete(engine(), prompts, str(out)))
    assert out.read_text() == whole


def test_equal_prompts_of_a_file_have_seeds_of_their_own_where_they_are_drawn(tmp_path):
    drawn = dataclasses.replace(GREEDY, temperature=1.0, seed=2**63 - 2)
    (tmp_path / "in.txt").write_text("a\n" * 3)
    read = lambda name, sampling: [one.sampling.seed for one in files.read_prompts(str(tmp_path / name), sampling)]  # noqa: E731
    assert read("in.txt", drawn) == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert read("in.txt", GREEDY) == [GREEDY.seed] * 3
    lines = [{"prompt": "a"}, {"prompt": "a", "seed": 5}, {"prompt": "a", "temperature": 1.0}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read("in.jsonl", GREEDY) == [GREEDY.seed, 5, GREEDY.seed + 2]


@pytest.mark.parametrize("text", ["notes", "a\nb", '{"x": 1}', '{"prompt": "a"}', '{"prompt": "a"}\n{"prompt": "b"}'])
def test_a_file_of_somebody_else_is_left_as_it_is(tmp_path, text):
    out = tmp_path / "out.jsonl"
    out.write_text(text)
    prompts = [files.Prompt(text, GREEDY, {}, "in.txt:1") for text in ("a", "b")]
    with pytest.raises(UserError, match="name another file"):
        list(files.complete(engine(), prompts, str(out)))
    assert out.read_text() == text


def test_odd_prompts_and_outputs(tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "new" / "out.jsonl"
    path.write_text('{"prompt": "\\ud800"}\n' + json.dumps({"prompt": "x" * 70}) + "\n")
    prompts = files.read_prompts(str(path), GREEDY)
    for _ in range(2):
        assert list(files.complete(engine(), prompts[:1], str(out)))[-1] == 1
    with pytest.raises(UserError, match="in.jsonl:2: the prompt has 71 tokens"):
        list(files.complete(engine(), prompts, str(out)))
    with pytest.raises(UserError, match="cannot be written"):
        list(files.complete(engine(), prompts, str(tmp_path)))


@pytest.mark.parametrize(
    "line, says",
    [
        ("[1]", 'a string "prompt"'),
        ("[" * 50000, 'a string "prompt"'),
        ('{"prompt": 1}', 'a string "prompt"'),
        ('{"prompt": "a", "temperatur": 1}', "did you mean temperature"),
        ('{"prompt": "a", "top_k": 0}', "Sampling.top_k is 0"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(UserError, match=f"in.jsonl:2.*{says}"):
        files.read_prompts(str(path), GREEDY)
    with pytest.raises(UserError, match="cannot be read"):
        files.read_prompts(str(tmp_path / "none.txt"), GREEDY)


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt"])
def test_a_line_without_end_is_one_error(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files.limits, "LINE_BYTES", 1000)
    (tmp_path / name).write_text('{"prompt": "a"}\n' + "x" * 1001)
    with pytest.raises(UserError, match=f"{name}:2 is longer than 1,000 bytes"):
        files.read_prompts(str(tmp_path / name), GREEDY)


def test_prompts_are_read_no_further_than_the_first_mistake(tmp_path, monkeypatch):
    (tmp_path / "p.jsonl").write_text("b\n" + "a" * 100 + "\n")
    monkeypatch.setattr(files.limits, "LINE_BYTES", 50)
    with pytest.raises(UserError, match="p.jsonl:1 must be a JSON object"):
        files.read_prompts(str(tmp_path / "p.jsonl"), GREEDY)


def test_a_file_has_a_bounded_number_of_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST", 3)
    (tmp_path / "p.txt").write_text("a\n" * 3)
    assert len(files.read_prompts(str(tmp_path / "p.txt"), GREEDY)) == 3
    (tmp_path / "p.txt").write_text("a\n" * 4)
    with pytest.raises(UserError, match="more than 3 lines, each a prompt: put them in several files"):
        files.read_prompts(str(tmp_path / "p.txt"), GREEDY)


def test_speeds_are_measured():
    found = speed.measure(engine(), dataclasses.replace(GREEDY, max_new_tokens=6), 20, VOCABULARY.size)
    assert all(value > 0 for value in found.values())
    at_s = (1.0, 1.0, 1.0, 1.4, 1.4)  # they come together, three and two
    text = types.SimpleNamespace(pieces=[Piece("", token, 0.0, (), at_s=at) for token, at in enumerate(at_s)])
    assert speed._between_tokens(text) == pytest.approx(0.1)


def test_a_completion_names_the_token_that_ended_it():
    result = engine().submit("def f", GREEDY).result()
    assert result.end is None
    first, *_ = result.tokens
    ended = engine().submit("def f", GREEDY, ends=(first,)).result()
    assert ended.tokens == [] and ended.end == first


def test_a_model_with_adapters_generates_as_the_merged_one():
    adapted = api.build(dataclasses.replace(MODEL.config, lora=Lora(rank=2, targets=("all-linear",))))
    values = jax.tree.map(lambda x: x + 0.1, adapted.adapt(params(), jax.random.key(2)))
    texts = [
        Engine(model, given, VOCABULARY, LENGTH, EngineConfig(slots=2)).submit("def f", GREEDY).result().tokens
        for model, given in ((adapted, values), (MODEL, jax.jit(adapted.merge)(values)))
    ]
    assert texts[0] == texts[1] != engine().submit("def f", GREEDY).result().tokens
