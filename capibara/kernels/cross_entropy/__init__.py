"""Cross entropy from hidden states and the output projection, by blocks of tokens or by parts of the vocabulary.

`dispatch` chooses; `reference` has whole logits, for tests.
"""
