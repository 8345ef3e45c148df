"""What a run uses of its machine and devices: sampled by a thread, written to metrics.jsonl."""
