"""The processes of a run: how they join, speak to each other and agree."""
