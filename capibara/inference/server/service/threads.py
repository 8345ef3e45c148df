"""Threads in which requests are prepared, so that other requests' tokens do not wait for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

# Two: the interpreter runs one at a time, except while it waits for a tokenizer or a template.
PREPARING = ThreadPoolExecutor(2, thread_name_prefix="preparing")
# What may compile a program or wait for the devices has threads of its own: prompts of others do not wait for it.
READING = ThreadPoolExecutor(2, thread_name_prefix="reading")
# Those of strategies wait for the engine, and hardly work.
THINKING = ThreadPoolExecutor(64, thread_name_prefix="thinking")
# One adapter at a time is read from the disk.
LOADING = ThreadPoolExecutor(1, thread_name_prefix="loading adapters")
