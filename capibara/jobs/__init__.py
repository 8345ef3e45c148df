"""Runs verbs on this machine and restarts them after a failure; makes jobs of them for other systems."""
