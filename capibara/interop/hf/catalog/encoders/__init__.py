"""Encoders for masked training: RoBERTa, ELECTRA, ERNIE, ModernBERT and others like BERT."""
