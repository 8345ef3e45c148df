"""Attention of queries, keys and values: by cuDNN, by splash on TPU, a block at a time."""
