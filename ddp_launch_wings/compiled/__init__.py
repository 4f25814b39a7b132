"""Carries what torch.compile has made to ranks that start later: in the node's memory, from node to node, on disk."""
