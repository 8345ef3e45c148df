"""Packs documents and pairs into rows of a fixed length."""
