"""The way into the rendezvous: where it is, whether it can be reached, what this node brings."""
