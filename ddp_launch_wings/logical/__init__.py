"""Logical ranks: a world of a fixed size, whatever the number of processes."""
