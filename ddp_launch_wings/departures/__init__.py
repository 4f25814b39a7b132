"""Takes a node out of a job before it leaves: after a spot notice, a cordon or DRAIN, or when a Slurm job ends."""
