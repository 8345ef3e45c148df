"""Finds the chunks of documents that are nearest to a text: embeddings in a compressed index, and what is made with them."""
