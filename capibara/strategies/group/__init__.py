"""A group of runs, each a job of its own, whose models meet in a folder that all can reach."""
