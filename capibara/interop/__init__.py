"""Models of other frameworks, in and out."""
