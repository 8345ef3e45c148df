"""What builders read: files, their fingerprints, and what was wrong with them."""
