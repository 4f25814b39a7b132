"""Tells programs of the user what happens to the job: a command (`--on-event`), entry points, and traces (OTLP)."""
