"""The rendezvous: decides who is in a job, which rank everyone has, and what follows a failure."""
