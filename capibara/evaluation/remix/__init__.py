"""Re-mixes a model's experts at test time."""
