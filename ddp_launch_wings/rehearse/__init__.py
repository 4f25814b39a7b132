"""`ddp-launch rehearse`: plays failures in short runs of the user's script, and compares them with undisturbed ones."""
