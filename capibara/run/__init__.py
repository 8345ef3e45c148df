"""A run as a value: readers make it, functions change it, `capibara train` trains it."""
