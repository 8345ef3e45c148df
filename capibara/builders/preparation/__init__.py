"""Prepares a corpus: exact and near deduplication, filters, tokens packed once into ArrayRecord shards."""
