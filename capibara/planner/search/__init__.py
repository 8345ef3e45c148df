"""Finds the legal plans and ranks them."""
