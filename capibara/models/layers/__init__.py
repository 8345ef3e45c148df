"""Projections, norms, embeddings and rotations, and how layers are stacked."""
