"""Redundancy of commits in memory: other nodes keep copies or parity of what each rank holds."""
