"""An engine that follows makes the same steps as the leading one; tests/hosts runs them in two processes."""

from __future__ import annotations

import json

import jax
import pytest

from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.requests.following import Orders, Submission
from capibara.inference.engine.requests.stream import Finish
from capibara.inference.engine.runner import decode_schedule
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.api import DecoderConfig

MODEL = api.build(DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32"))
GREEDY = Sampling(temperature=0.0, max_new_tokens=9)
DRAWN = Sampling(temperature=1.0, top_p=0.9, seed=3, max_new_tokens=14, stop=("\n\n",))
CONFIGS = [{}, {"decode_steps": 1}, {"page_size": 8, "pages": 9}, {"draft_tokens": 2}]


class Recorded(Engine):
    """Records the programs that it calls, with arguments from the host; `follow` passes `cancelled` requests."""

    def __init__(self, **config):
        params = jax.jit(MODEL.init)(jax.random.key(0))
        super().__init__(MODEL, params, ByteVocabulary(), 64, EngineConfig(slots=2, **config))
        self.calls, programs = [], self.core.runner.programs

        def noted(name):
            program = getattr(programs, name)

            def call(*args):
                plain = [arg for arg in args if not isinstance(arg, dict) and not isinstance(arg, jax.Array)]
                self.calls.append((name, repr(jax.tree.map(lambda x: x, plain))))
                return program(*args)

            return call

        self.core.runner.programs = programs._replace(
            **{name: noted(name) for name in ("admit", "step", "verify", "take_row", "row")}
        )


def sent(*configs):
    """An engine that leads, and the messages that it sends, as JSON."""
    lead, messages = Recorded(**configs[0]), []
    lead.lead(lambda message: messages.append(json.dumps(message)))
    return lead, messages


@pytest.mark.parametrize("config", [pytest.param(c, marks=pytest.mark.heavy if c else ()) for c in CONFIGS], ids=str)
def test_what_follows_calls_the_same_programs_with_the_same(config, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(decode_schedule.time, "monotonic", lambda: clock[0])
    lead, messages = sent(config)
    lead.core.schedule.streaming = True
    streams = [
        lead.submit("def f" * (1 + i), DRAWN if i % 2 else GREEDY, likeliest=i if config else 0) for i in range(3)
    ]
    for turn in range(99):
        clock[0] += (0.02, 0.3, 0.01)[turn % 3]  # of process 0 alone
        busy = lead.step()
        if turn == 2:
            streams[1].cancel()
            streams.append(lead.submit([5, 6, 7], GREEDY, ends=(9,)))
        if not busy:
            break
    assert [one.result().finish for one in streams][1] is Finish.CANCELLED
    clock[0] += 1000.0
    follows = Recorded(**config)
    follows.follow(map(json.loads, messages))
    assert follows.calls == lead.calls and len(lead.calls) > 10
    assert follows.core.runner.checksum.value == lead.core.runner.checksum.value and follows.load == (0, 0)


def test_other_tokens_are_found_at_the_next_step():
    lead, messages = sent({})
    lead.submit("def", GREEDY).result()
    follows = Recorded()
    follows.update(jax.tree.map(lambda x: -x, jax.jit(MODEL.init)(jax.random.key(0))))
    with pytest.raises(RuntimeError, match="other tokens than process 0"):
        follows.follow(map(json.loads, messages))
    assert len(follows.calls) < len(lead.calls)


def test_orders_come_as_they_were_given():
    odd = Sampling(
        temperature=0.1 + 0.2, stop=("ü", "\n"), thinking_tokens=3, thinking_tags=("<a>", "</a>"), seed=-(2**63)
    )
    orders = Orders([Submission([1, 2], odd, (3,), 4), Submission([5], Sampling(), (), 0, "poet")], [7], 4, 2**32 - 1)
    found = Orders.of(json.loads(json.dumps(orders.packed())))
    assert [one.sampling for one in found.submitted] == [odd, Sampling()]
    assert [one.adapter for one in found.submitted] == [None, "poet"]
    assert found.packed() == orders.packed()
