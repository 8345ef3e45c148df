"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): each column is rounded, and those after it make up for its error."""

from __future__ import annotations

import numpy as np
from scipy import linalg

from capibara.interop.quantize.grid import Grid, Packed

_BLOCK = 128  # columns whose error is carried to all after them at once; a multiple of every group size
_DAMP = 0.01  # added to the Hessian's diagonal, as a share of its mean


def gptq(
    weight_OI: np.ndarray, hessian_II: np.ndarray, grid: Grid, *, damp: float = _DAMP, act_order: bool = True
) -> Packed:
    """A weight in 4 bits whose products with the calibration's inputs are near those of the weight.

    Args:
      weight_OI: the weight, outputs first.
      hessian_II: sum over the calibration's tokens of the products of their inputs, x x^T.
      grid: what is rounded to; its group size divides the inputs.
      damp: share of the diagonal's mean that is added to it.
      act_order: round the inputs with the largest squares first, on scales made before; else in their order, with the
        scales of each group made when its turn comes. Which inputs share a scale is the same.
    """
    weight, hessian = weight_OI.astype(np.float64), hessian_II.astype(np.float64)
    diagonal = np.diagonal(hessian).copy()
    silent = diagonal == 0  # inputs that are always 0
    hessian[silent, silent] = 1.0
    weight[:, silent] = 0.0
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(len(diagonal))
    factor = _inverse_factor(hessian[np.ix_(order, order)], damp)
    scales, zeros = grid.fit(weight.astype(np.float32), diagonal)
    codes = np.zeros(weight.shape[::-1], np.uint8)
    left = np.ascontiguousarray(weight.T[order].astype(np.float32))  # [I, O]: a column is one piece of memory
    for start in range(0, len(left), _BLOCK):
        block = left[start : start + _BLOCK]
        inside = factor[start : start + _BLOCK, start : start + _BLOCK]
        errors = np.empty_like(block)
        for index, column in enumerate(order[start : start + _BLOCK]):
            group, first = divmod(int(column), grid.group_size)
            if first == 0 and not act_order:
                now = np.ascontiguousarray(block[index : index + grid.group_size].T)
                new = grid.fit(now, diagonal[column : column + grid.group_size])
                scales, zeros = _with_group(scales, new[0], group), _with_group(zeros, new[1], group)
            step, zero = scales[:, group].astype(np.float32), zeros[:, group].astype(np.float32)
            code = np.clip(np.round(block[index] / np.where(step == 0, 1, step)) + zero, 0, 15)
            codes[column] = code
            errors[index] = (block[index] - step * (code - zero)) / inside[index, index]
            block[index + 1 :] -= np.outer(inside[index, index + 1 :], errors[index])
        left[start + _BLOCK :] -= factor[start : start + _BLOCK, start + _BLOCK :].T @ errors
    return Packed(np.ascontiguousarray(codes.T), scales, zeros)


def _inverse_factor(hessian: np.ndarray, damp: float) -> np.ndarray:
    """U, upper triangular, float32, with U^T U the inverse of the damped Hessian."""
    damped = hessian + damp * np.mean(np.diagonal(hessian)) * np.eye(len(hessian))
    # The Cholesky factor of the matrix read backwards, read backwards: hessian = R R^T with R upper, so that U = R^-1.
    upper = linalg.cholesky(damped[::-1, ::-1], lower=True)[::-1, ::-1]
    return linalg.solve_triangular(upper, np.eye(len(upper))).astype(np.float32)


def _with_group(whole: np.ndarray, new: np.ndarray, group: int) -> np.ndarray:
    whole = whole.copy() if not whole.flags.writeable else whole
    whole[:, group] = new[:, 0]
    return whole
