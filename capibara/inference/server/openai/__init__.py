"""OpenAI's API: bodies of requests, the texts that they ask for, and responses."""
