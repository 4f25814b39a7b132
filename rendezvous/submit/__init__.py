"""`ddpctl submit`: one job file, rendered for Kubernetes, Slurm or plain machines, and handed to the user's tools."""
