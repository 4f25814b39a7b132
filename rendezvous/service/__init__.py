"""The I/O layer of the service: calls, streams, jobs and their owners, metrics, health, shutdown."""
