"""The wings: what is not start, watch, heal, average or resume (docs/architecture.md, "Doors and wings").

Each folder is a wing. It imports what it needs of the house, and no other wing. The house finds it by a name in
`entry_points.txt`, and works without it.
"""
