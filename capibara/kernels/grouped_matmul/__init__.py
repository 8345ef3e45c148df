"""Rows sorted by group, each group times its own matrix: the product of a mixture of experts without a capacity."""
