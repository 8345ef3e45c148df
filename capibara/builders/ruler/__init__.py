"""Long documents with questions about them, of any length, after RULER."""
