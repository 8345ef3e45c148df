"""Opens models of any form for inference, conversion and evaluation: run folders, Hugging Face folders, .gguf files."""
