"""How a model that is evaluated uses its experts."""
