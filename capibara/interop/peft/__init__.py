"""Adapters in PEFT's format."""
