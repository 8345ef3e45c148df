"""What the planner found, for people and machines."""
