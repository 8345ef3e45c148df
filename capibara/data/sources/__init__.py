"""Where documents and conversations come from."""
