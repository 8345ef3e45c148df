"""Anthropic's Messages API: bodies of requests, and responses."""
