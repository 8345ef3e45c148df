"""Training with more than one model or more than the data: nodes that reach consensus, groups of jobs, GRPO."""
