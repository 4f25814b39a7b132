"""Optimizer state divided among the ranks."""
