"""Products of activations and weights: plain, in the orders that XLA's CPU back end runs at full speed, in 8 bits."""
