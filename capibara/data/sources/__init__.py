"""Sources of documents and conversations."""
