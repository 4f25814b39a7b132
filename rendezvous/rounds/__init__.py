"""What `machine` decides with: who comes, which rank, what follows a failure, what is kept and shown of it. Pure."""
