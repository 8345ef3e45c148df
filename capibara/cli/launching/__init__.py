"""What `capibara launch` does on each system."""
