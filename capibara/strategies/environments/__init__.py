"""Environments: partners that answer a model's messages during a rollout."""
