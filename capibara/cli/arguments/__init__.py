"""Command-line arguments that verbs share."""
