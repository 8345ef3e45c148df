"""Allocation of pages to slots, and the prefix cache."""
