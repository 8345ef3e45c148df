"""Alerts: what is wrong with runs, and who is informed."""
