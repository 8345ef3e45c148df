"""Finds secrets and personal data in text and replaces them by placeholders."""
