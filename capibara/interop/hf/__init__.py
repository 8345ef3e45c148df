"""Folders in the format of Hugging Face transformers."""
