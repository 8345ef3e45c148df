"""Cross entropy of hidden states and an output projection: logits whole, by blocks of tokens, by parts of the vocabulary."""
