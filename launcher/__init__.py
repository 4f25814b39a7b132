"""The launcher: a torch-free agent that starts, watches and ends the ranks of one node."""
