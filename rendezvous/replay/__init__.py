"""Journals of what the state machines were given, and `ddpctl replay`, which runs the same machines again."""
