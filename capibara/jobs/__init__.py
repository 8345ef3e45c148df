"""Starts runs in one or several processes and restarts them after a failure."""
