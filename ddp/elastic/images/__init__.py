"""Commits in memory: state as a tree of tensors, its image, and the memory that holds it."""
