"""Attention of queries to keys and values: the plain formula, blocks of queries, cuDNN on GPU, splash on TPU."""
