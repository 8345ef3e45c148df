"""Reads run folders: metrics.jsonl by position into columns, and which runs there are."""
