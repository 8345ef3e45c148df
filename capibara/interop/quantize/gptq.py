"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): rounds column by column, and corrects later ones for the error."""

from __future__ import annotations

import numpy as np
from scipy import linalg

from capibara.interop.quantize.grid import Grid, Packed

_BLOCK = 128  # columns whose error is propagated to later ones at once; a multiple of every group size
_DAMP = 0.01  # added to the Hessian's diagonal, as a share of its mean


def gptq(
    weight_OI: np.ndarray, hessian_II: np.ndarray, grid: Grid, *, damp: float = _DAMP, act_order: bool = True
) -> Packed:
    """Rounds a weight to 4 bits so that its products with the calibration's inputs change little.

    Args:
      weight_OI: the weight, outputs first.
      hessian_II: sum of x x^T over the calibration tokens' inputs x.
      grid: the quantization grid; its group size divides the inputs.
      damp: share of the diagonal's mean that is added to it.
      act_order: round inputs with the largest squares first, with all scales computed in advance; else in order, with
        each group's scales computed when it is reached. The assignment of inputs to groups is the same.
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
    left = np.ascontiguousarray(weight.T[order].astype(np.float32))  # [I, O]: columns are contiguous
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
    """U, upper triangular, float32, where U^T U is the inverse of the damped Hessian."""
    damped = hessian + damp * np.mean(np.diagonal(hessian)) * np.eye(len(hessian))
    # By the Cholesky factor of the reversed matrix, reversed: hessian = R R^T with R upper triangular, so that U =
    # R^-1.
    upper = linalg.cholesky(damped[::-1, ::-1], lower=True)[::-1, ::-1]
    return linalg.solve_triangular(upper, np.eye(len(upper))).astype(np.float32)


def _with_group(whole: np.ndarray, new: np.ndarray, group: int) -> np.ndarray:
    whole = whole.copy() if not whole.flags.writeable else whole
    whole[:, group] = new[:, 0]
    return whole
