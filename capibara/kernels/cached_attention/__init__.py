"""Attention of new tokens to a cache of keys and values, stored as rows or as pages of a pool."""
