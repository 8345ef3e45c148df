"""Attention of queries to keys and values: a reference, blockwise on CPU, cuDNN on GPU, splash on TPU."""
