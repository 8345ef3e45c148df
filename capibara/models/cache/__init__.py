"""Keys and values of tokens that were read."""
