"""A node of a group that begins as another one does and then sends garbage of many kinds: liar.py EXCHANGE NAME LIKE."""

from __future__ import annotations

import sys
import time

import numpy as np

from capibara.storage import hashing
from capibara.strategies.group import arrays
from capibara.strategies.group.exchange import Exchange, Note


def send(exchange: Exchange, number: int, name: str, data: bytes) -> None:
    exchange.send(number, name, data, Note(hashing.hash_of(data), len(data), 1.0, 1.0, 5))


def garbage(number: int, model: dict[str, np.ndarray]) -> bytes:
    """Of round `number`: noise as a file, NaN, noise as parameters, one parameter alone, the parameters' negation."""
    rng = np.random.default_rng(number)
    kind = number % 5
    if kind == 0:
        return rng.bytes(10_000)
    if kind == 3:
        return arrays.to_bytes(dict([next(iter(model.items()))]))
    change = {1: lambda x: x * np.nan, 2: lambda x: 100 * rng.standard_normal(x.shape), 4: lambda x: -50 * x}[kind]
    return arrays.to_bytes({name: np.asarray(change(x), np.float32) for name, x in model.items()})


def main(folder: str, name: str, like: str) -> None:
    exchange, last = Exchange(folder), -1
    while True:
        agreed = exchange.agreed()
        number = 0 if agreed is None else agreed.round_ + 1
        if agreed is not None and agreed.status != "running":
            return
        if number > last and (agreed is not None or like in exchange.senders(0)):
            if agreed is None:
                send(exchange, 0, name, exchange.update(0, like, exchange.note(0, like), 10**9))
            else:
                send(exchange, number, name, garbage(number, arrays.from_bytes(exchange.read_model(agreed))))
            last = number
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
