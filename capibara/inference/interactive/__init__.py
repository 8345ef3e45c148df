"""Generation for files of prompts, and conversations in a terminal."""
