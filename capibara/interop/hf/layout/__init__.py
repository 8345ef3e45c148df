"""How a family of Hugging Face models is declared: its keys, its tensors, and rows that families share."""
