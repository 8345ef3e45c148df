"""Parts of which architectures are made: attention, mixtures of experts, the layers of a transformer."""
