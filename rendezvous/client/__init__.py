"""The client side of the rendezvous, for agents and tools. This package does not import the service."""
