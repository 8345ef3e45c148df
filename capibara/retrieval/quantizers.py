"""How an index stores its vectors: codes, lists and what is searched of them, as faiss makes them.

Product quantization (PQ) is Jégou et al. 2011, https://doi.org/10.1109/TPAMI.2010.57; its rotation (OPQ) Ge et al. 2014,
https://doi.org/10.1109/TPAMI.2013.240. Distances are inner products.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.core import extras

if TYPE_CHECKING:
    import faiss

# faiss's own 25 rounds of k-means, and 50 of OPQ with 40 and then 4 of k-means each, take minutes for each setting.
_ROUNDS, _OPQ_ROUNDS, _OPQ_FIRST, _OPQ_NEXT, OPQ_VECTORS = 10, 4, 8, 2, 39 * 256


class Codes(enum.StrEnum):
    """What is stored of a vector."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
    PQ = "pq"


_FACTORY = {Codes.FLOAT32: "Flat", Codes.FLOAT16: "SQfp16", Codes.INT8: "SQ8"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantizer:
    """Settings of an index.

    Attributes:
      codes: what is stored of each vector.
      pq_bytes: bytes of a code of PQ, each for a part of the vector; 0: of other codes.
      opq: whether vectors are rotated so that the parts of PQ lose least.
      reduced: dimensions that are left of a vector, its first principal components; 0: all.
      lists: of an inverted file; 0: every vector is compared with a query.
      refined: the codes by which the nearest are compared again; None: they are not.
    """

    codes: Codes = Codes.PQ
    pq_bytes: int = 0
    opq: bool = False
    reduced: int = 0
    lists: int = 0
    refined: Codes | None = None

    @property
    def factory(self) -> str:
        """The settings as faiss names them; without `np` it would also order codes for a search by Hamming distance, for minutes."""
        parts = [f"OPQ{self.pq_bytes}"] if self.opq else []
        parts += [f"PCA{self.reduced}"] if self.reduced else []
        parts += [f"IVF{self.lists}"] if self.lists else []
        parts.append(f"PQ{self.pq_bytes}np" if self.codes is Codes.PQ else _FACTORY[self.codes])
        parts += [f"Refine({_FACTORY[self.refined]})"] if self.refined else []
        return ",".join(parts)

    @property
    def code_bytes(self) -> int:
        """Bytes of a code of PQ, or of principal components."""
        return self.pq_bytes or self.reduced

    def trained(self, vectors_ND: np.ndarray, seed: int) -> faiss.Index:
        """An empty index whose codes are learned from vectors: float32 [N, D]."""
        faiss = library()
        index = faiss.index_factory(vectors_ND.shape[1], self.factory, faiss.METRIC_INNER_PRODUCT)
        base = faiss.downcast_index(index.base_index) if self.refined else index
        if self.opq:
            rotation = faiss.downcast_VectorTransform(base.chain.at(0))
            rotation.niter, rotation.max_train_points = _OPQ_ROUNDS, OPQ_VECTORS
            rotation.niter_pq_0, rotation.niter_pq = _OPQ_FIRST, _OPQ_NEXT
            base = faiss.downcast_index(base.index)
        if self.codes is Codes.PQ:
            base.pq.cp.seed, base.pq.cp.niter, base.pq.cp.min_points_per_centroid = seed, _ROUNDS, 1
        if self.lists:
            base.cp.seed, base.cp.niter, base.cp.min_points_per_centroid = seed, _ROUNDS, 1
        # The threads of OpenMP spin while they wait: on busy cores two need 18 times the time of one for the short parts of PQ.
        with one_thread():
            index.train(vectors_ND)
        return index

    def stored(self, index: faiss.Index, vectors_ND: np.ndarray) -> None:
        """Adds vectors of length 1 to a trained index.

        Each is scaled so that what its code stands for has length 1: codes are means, which are shorter than what they stand for,
        by different shares, and an inner product would take that for a distance.
        """
        scaled_ND = vectors_ND
        if self.refined is None and self.codes is not Codes.FLOAT32:
            decoded_ND = index.sa_decode(index.sa_encode(vectors_ND))
            scaled_ND = vectors_ND / np.maximum(np.linalg.norm(decoded_ND, axis=1, keepdims=True), 0.1)
        index.add(scaled_ND)

    def searched(self, index: faiss.Index, effort: int) -> None:
        """Sets how much of an index a search reads: lists of an inverted file, or times k that are compared again."""
        space = library().ParameterSpace()
        if self.lists:
            space.set_index_parameter(index, "nprobe", min(effort, self.lists))
        if self.refined:
            space.set_index_parameter(index, "k_factor_rf", effort)

    @property
    def efforts(self) -> tuple[int, ...]:
        """The values of `searched` that are tried."""
        if self.lists:
            return tuple(2**i for i in range(self.lists.bit_length()))
        return (2, 8, 32) if self.refined else (1,)

    def as_json(self) -> dict[str, Any]:
        return {"factory": self.factory} | dataclasses.asdict(self)


def library() -> Any:
    """The module of faiss.

    Raises:
      UserError: it is not installed.
    """
    return extras.require("faiss", extra="retrieval", why="an index")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Context in which faiss uses one core."""
    faiss = library()
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def divisors(dims: int) -> list[int]:
    """The sizes of codes of PQ: each byte is for 2 to 32 dimensions, as many for each."""
    return [dims // size for size in range(32, 1, -1) if dims % size == 0]
