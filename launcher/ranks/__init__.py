"""Processes of the ranks: how they are started, with which environment, on which CPUs and devices."""
