"""`ddpctl replay`: makes the decisions of a journal again, or with other settings."""
