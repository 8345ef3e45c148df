"""Files of prompts and conversations in a terminal."""
