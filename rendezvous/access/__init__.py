"""Access control: tokens, certificates and secrets, and the log and metrics of refused clients."""
