"""Parts of which architectures are made."""
