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

_ROUNDS = 10  # of k-means; faiss's own 25 find little more, and take minutes for each setting
_AGAIN = 4  # times k that are compared again


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
        parts = [f"PCA{self.reduced}"] if self.reduced else []
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
        dims = vectors_ND.shape[1]
        rotated = dims // self.pq_bytes * self.pq_bytes if self.opq else dims
        index = faiss.index_factory(rotated, self.factory, faiss.METRIC_INNER_PRODUCT)
        base = faiss.downcast_index(index.base_index) if self.refined else index
        if self.codes is Codes.PQ:
            base.pq.cp.seed, base.pq.cp.niter, base.pq.cp.min_points_per_centroid = seed, _ROUNDS, 1
        if self.lists:
            base.cp.seed, base.cp.niter, base.cp.min_points_per_centroid = seed, _ROUNDS, 1
        if self.opq:
            rotation = faiss.LinearTransform(dims, rotated)
            faiss.copy_array_to_vector(balanced_rotation(vectors_ND, self.pq_bytes).ravel(), rotation.A)
            rotation.is_trained = True
            rotation.set_is_orthonormal()
            index = faiss.IndexPreTransform(rotation, index)
        # The threads of OpenMP spin while they wait: on busy cores two need 18 times the time of one for the short parts of PQ.
        with one_thread():
            index.train(vectors_ND)
        return index

    def nearest(self, index: faiss.Index, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The scores [Q, k] and numbers [Q, k] of the vectors nearest to queries; the number of a vector that is missing is -1.

        The nearest by their codes are compared again by what the codes stand for, scaled to length 1: codes are means, which are
        shorter than the vectors by different shares, and an inner product alone takes that for a distance.
        """
        if self.refined or self.codes in (Codes.FLOAT32, Codes.FLOAT16):
            return index.search(queries_QD, k)
        _, indices_QC, vectors_QCD = index.search_and_reconstruct(queries_QD, min(_AGAIN * k, index.ntotal))
        lengths_QC = np.linalg.norm(vectors_QCD, axis=-1)
        scores_QC = np.einsum("qd,qcd->qc", queries_QD, vectors_QCD) / np.maximum(lengths_QC, 1e-12)
        scores_QC[indices_QC < 0] = -np.inf
        order_QK = np.argsort(-scores_QC, axis=1)[:, :k]
        return np.take_along_axis(scores_QC, order_QK, 1), np.take_along_axis(indices_QC, order_QK, 1)

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
        return {"factory": f"OPQ,{self.factory}" if self.opq else self.factory} | dataclasses.asdict(self)


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


def balanced_rotation(vectors_ND: np.ndarray, parts: int) -> np.ndarray:
    """The rotation of OPQ's parametric solution: principal axes, dealt so that parts have equal products of variances.

    Args:
      vectors_ND: float32 [N, D].
      parts: of PQ, at most D; the last axes that would leave some parts longer than others are dropped.

    Returns:
      float32 [D', D]; a row is an axis.
    """
    variances_D, axes_DD = np.linalg.eigh(np.cov(vectors_ND, rowvar=False))
    dims = len(variances_D)
    logs_D = np.log(np.maximum(variances_D, variances_D.max() * 1e-9))
    dealt: list[list[int]] = [[] for _ in range(parts)]
    sums_P = np.zeros(parts)
    for axis in reversed(
        range(dims % parts, dims)
    ):  # the largest variance first; to the part with the least product that has room
        part = min(
            (len(members) > 0, total, number)
            for number, (members, total) in enumerate(zip(dealt, sums_P))
            if len(members) < dims // parts
        )[2]
        dealt[part].append(axis)
        sums_P[part] += logs_D[axis]
    return np.ascontiguousarray(axes_DD[:, [axis for members in dealt for axis in members]].T, np.float32)


def divisors(dims: int) -> list[int]:
    """The sizes of codes of PQ: each byte is for 2 to 32 dimensions, as many for each."""
    return [dims // size for size in range(32, 1, -1) if dims % size == 0]


def rotated_sizes(dims: int) -> list[int]:
    """The sizes of codes of OPQ, which may drop an eighth of the principal axes: `divisors`, and multiples of 16."""
    others = [size for size in range(16, dims // 2 + 1, 16) if dims % size <= dims // 8]
    return sorted({*divisors(dims), *others})
