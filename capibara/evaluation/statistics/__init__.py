"""Statistics of scores: intervals that hold while more scores arrive."""
