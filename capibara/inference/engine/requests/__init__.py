"""Requests: their adapters, texts and faults."""
