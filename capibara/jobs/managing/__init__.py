"""Keeps jobs alive: submits them, watches them, replaces what was preempted, and remembers all that."""
