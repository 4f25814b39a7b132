"""Restarts and jobs as traces of OpenTelemetry (`--otlp-endpoint`)."""
