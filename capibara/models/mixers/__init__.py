"""Mixers: what some layers have in place of attention, with a state of fixed size in place of cached tokens."""
