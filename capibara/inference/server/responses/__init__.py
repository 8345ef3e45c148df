"""OpenAI's Responses API without stored state: bodies of requests, and responses."""
