"""Stability of a run: loss spikes, numbers that are not finite, steps that hang."""
