"""Keeps jobs alive: submits them, looks after them, replaces what was taken from them, and remembers all that."""
