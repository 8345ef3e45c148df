"""Trackers: callbacks that store metrics."""
