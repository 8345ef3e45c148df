"""Objectives: the losses that training minimises, and the batches that they need."""
