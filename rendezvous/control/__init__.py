"""ddpctl: the command line to inspect and control jobs."""
