"""The families of GGUF files that are declared by a few lines each; names.py registers them."""
