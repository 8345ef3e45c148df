"""Placement of an engine on the devices, and its memory."""
