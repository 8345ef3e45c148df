"""How the next token is chosen, and how tokens become text."""
