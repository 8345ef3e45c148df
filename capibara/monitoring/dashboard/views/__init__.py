"""What viewers see of a run, as JSON values."""
