"""What an agent or a tool needs to reach a rendezvous; it imports nothing of the service."""
