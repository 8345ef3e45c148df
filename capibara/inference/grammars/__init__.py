"""Structured output: grammars as masks of the tokens that may come next."""
