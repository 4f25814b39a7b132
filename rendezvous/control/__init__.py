"""ddpctl: the command line for looking at jobs and giving them orders."""
