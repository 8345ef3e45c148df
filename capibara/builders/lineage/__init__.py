"""Where data comes from: OpenLineage events of builds and runs, and the chain from a checkpoint to its sources."""
