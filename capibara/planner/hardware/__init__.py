"""Chips, slices and their networks."""
