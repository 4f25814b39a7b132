"""Commits on disk or in an object store, as checkpoints of torch.distributed.checkpoint."""
