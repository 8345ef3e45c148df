"""capibara: trains, fine-tunes and merges language models on TPU slices from one Gin file."""

__version__ = "0.1.0"
