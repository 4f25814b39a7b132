"""Jobs that a service does not keep: their agents leave a file, and ddpctl reads it after the end."""
