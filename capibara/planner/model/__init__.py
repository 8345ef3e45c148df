"""Predicts the memory and the time of a train step."""
