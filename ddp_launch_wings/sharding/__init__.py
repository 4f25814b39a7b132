"""Sharding of optimizer state across the ranks."""
