"""What a run minimises."""
