"""Attention of new tokens to keys and values in a cache, which lie in rows or in pages of a pool."""
