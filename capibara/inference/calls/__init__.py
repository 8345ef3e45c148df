"""Tool calls in a model's text."""
