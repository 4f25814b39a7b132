"""The library inside a rank: process groups and the gradient reducer."""
