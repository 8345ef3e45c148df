"""Decoders whose layers attend to a window and to entries for windows of earlier tokens (DeepSeek-V4)."""
