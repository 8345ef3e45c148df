"""What a family of GGUF files is: its tensors, metadata and rotary positions."""
