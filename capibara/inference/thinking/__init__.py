"""Strategies that spend more tokens on an answer: more rounds, a vote of several answers, the best by a reward model."""
