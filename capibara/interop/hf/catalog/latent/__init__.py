"""Decoders whose attention reads latents of keys and values (DeepSeek-V2, 2024, arXiv:2405.04434)."""
