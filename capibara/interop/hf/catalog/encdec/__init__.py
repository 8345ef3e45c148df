"""Encoder-decoders with positions that are added to the embeddings: BART and Pegasus."""
