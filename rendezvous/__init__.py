"""The rendezvous: decides which nodes are in a job, which ranks they have, and what happens after a failure."""
