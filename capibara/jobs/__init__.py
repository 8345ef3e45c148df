"""Starting runs, and starting them again."""
