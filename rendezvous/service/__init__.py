"""The service's shell: calls, streams, jobs and their owners, metrics, health, shutdown."""
