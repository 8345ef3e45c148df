"""Extends the context of models with rotary positions, without training."""
