"""A report on runs: one HTML file with all that it shows, to be mailed or kept."""
