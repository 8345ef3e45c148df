"""Where metrics are kept."""
