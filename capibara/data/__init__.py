"""From text to packed batches: sources, vocabularies, packing and the resumable loader."""
