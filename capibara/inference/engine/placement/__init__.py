"""Where an engine lies on the devices, and what it needs there."""
