"""ddpctl: people's look at jobs, and their orders."""
