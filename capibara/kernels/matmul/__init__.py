"""Products of activations and weights: a reference, operand orders that are fast on CPU, 8-bit products."""
