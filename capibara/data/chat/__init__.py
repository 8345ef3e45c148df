"""Conversations: record formats, chat templates, and loss masks."""
