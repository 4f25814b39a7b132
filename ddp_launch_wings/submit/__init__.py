"""`ddpctl submit`: render a job file for Kubernetes, Slurm or plain machines, and submit it with the user's tools."""
