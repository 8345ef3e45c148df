"""Ways to train that are more than steps on given batches."""
