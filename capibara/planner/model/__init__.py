"""What a train step needs and takes: predictions."""
