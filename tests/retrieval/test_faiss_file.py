"""Files of faiss are read only if every number in them follows from the number of vectors and their dimensions."""

from __future__ import annotations

import numpy as np
import pytest

from capibara.core.limits import Refused
from capibara.retrieval import faiss_file
from capibara.retrieval.quantizers import Codes, Quantizer, library

COUNT, DIMS = 400, 16
QUANTIZERS = {
    "float32": Quantizer(codes=Codes.FLOAT32),
    "float16": Quantizer(codes=Codes.FLOAT16),
    "int8": Quantizer(codes=Codes.INT8),
    "pq": Quantizer(pq_bytes=4),
    "opq": Quantizer(pq_bytes=5, opq=True),
    "reduced": Quantizer(codes=Codes.INT8, reduced=8),
    "lists": Quantizer(lists=4, pq_bytes=4),
    "sparse_lists": Quantizer(lists=64, pq_bytes=4),
    "refined": Quantizer(pq_bytes=4, refined=Codes.INT8),
}


@pytest.fixture(scope="module")
def contents() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    vectors_ND = rng.normal(size=(COUNT, DIMS)).astype(np.float32)
    sparse_ND = np.repeat(vectors_ND[:8], COUNT // 8, axis=0)  # most of 64 lists stay empty
    result = {}
    for name, quantizer in QUANTIZERS.items():
        index = quantizer.trained(vectors_ND, 0)
        index.add(sparse_ND if name == "sparse_lists" else vectors_ND)
        result[name] = library().serialize_index(index)
    return result


def changed(content: np.ndarray, at: int, form: str, value: float) -> np.ndarray:
    result = content.copy()
    new = np.array([value], form).view(np.uint8)
    result[at : at + len(new)] = new
    return result


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_settings_of_what_the_build_writes_are_read_back(contents, name):
    assert faiss_file.quantizer_of(contents[name], COUNT, DIMS) == QUANTIZERS[name]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_truncated_files_and_bytes_after_the_end_are_refused(contents, name):
    content = contents[name]
    for size in (0, 3, 30, len(content) // 2, len(content) - 1):
        with pytest.raises(Refused, match="more are declared at byte"):
            faiss_file.quantizer_of(content[:size], COUNT, DIMS)
    with pytest.raises(Refused, match="1 bytes after its end"):
        faiss_file.quantizer_of(np.append(content, np.uint8(0)), COUNT, DIMS)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_other_numbers_of_vectors_and_dimensions_are_refused(contents, name):
    with pytest.raises(Refused, match="400 as its vectors, must be 401"):
        faiss_file.quantizer_of(contents[name], COUNT + 1, DIMS)
    with pytest.raises(Refused, match="16 as its dimensions, must be 32"):
        faiss_file.quantizer_of(contents[name], COUNT, 2 * DIMS)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_what_is_accepted_after_a_flipped_bit_is_read_and_searched_by_faiss_without_harm(contents, name):
    """Of the numbers at the file's start, where its sizes are: faiss refuses the rest, or answers."""
    rng, faiss, content = np.random.default_rng(1), library(), contents[name]
    queries_QD = np.ones((2, DIMS), np.float32)
    refused = 0
    for _ in range(200):
        flipped = content.copy()
        flipped[rng.integers(min(160, len(content)))] ^= 1 << rng.integers(8)
        try:
            quantizer = faiss_file.quantizer_of(flipped, COUNT, DIMS)
            index = faiss.deserialize_index(flipped)
        except (Refused, RuntimeError):
            refused += 1
            continue
        quantizer.searched(index, quantizer.efforts[0])
        with np.errstate(over="ignore", invalid="ignore"):  # a flipped exponent
            numbers_QK = quantizer.nearest(index, queries_QD, 4)[1]
        assert ((numbers_QK >= -1) & (numbers_QK < COUNT)).all()
    assert refused > 20


@pytest.mark.parametrize(
    ("name", "at", "form", "value", "error"),
    [
        ("float32", 0, "S4", b"IHNf", "index of the kind b'IHNf', which `capibara prepare index` does not write"),
        ("float32", 37, "<u8", 1 << 36, "68,719,476,736 as its size of an array, must be 6,400"),
        ("float32", 45, "<f4", np.nan, "values that are not finite"),
        ("float32", 33, "<i4", 1, "1 as its metric, must be 0"),
        ("int8", 37, "<i4", 6, "scalar codes of the kind 6"),
        ("float16", -2, "<f2", np.inf, "values that are not finite"),
        ("pq", 45, "<u8", 1 << 40, "codes of 1,099,511,627,776 parts, must divide 16 dimensions"),
        ("pq", 53, "<u8", 24, "24 as its bits of a part of a code, must be 8"),
        ("reduced", 37, "<i4", 1 << 30, "1,073,741,824 as its transforms, must be 1"),
        ("reduced", 41, "S4", b"HRot", "a transform of the kind b'HRot'"),
        ("lists", 37, "<u8", 1 << 50, "1,125,899,906,842,624 lists, must be from 1 to its 400 vectors"),
        ("lists", -8, "<i8", 1 << 40, "lists that do not have each of its 400 vectors once"),
    ],
)
def test_a_number_that_lies_is_named_before_faiss_reads_it(contents, name, at, form, value, error):
    content = contents[name]
    with pytest.raises(Refused, match=error):
        faiss_file.quantizer_of(changed(content, at % len(content), form, value), COUNT, DIMS)


def test_lists_in_a_file_elsewhere_are_refused(contents):
    """faiss would open the file that stands behind `ilod`."""
    content = contents["lists"].copy()
    (at,) = [i for i in range(len(content) - 4) if content[i : i + 4].tobytes() == b"ilar"]
    content[at : at + 4] = np.frombuffer(b"ilod", np.uint8)
    with pytest.raises(Refused, match="lists of the kind b'ilod'"):
        faiss_file.quantizer_of(content, COUNT, DIMS)
