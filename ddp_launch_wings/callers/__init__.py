"""Lets callers of torchrun start our agent unchanged, for those who ask for it in one Python environment."""
