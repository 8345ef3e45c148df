"""Multiplies rows, sorted by group, by their group's matrix: the product of a mixture of experts without a capacity."""
