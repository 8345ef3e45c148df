"""Rewards of answers: functions, verifiers that ask a library, a program or another model, and their sum."""
