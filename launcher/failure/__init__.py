"""Analyses a failure: collects data about it, classifies it, finds the cause, and writes the report."""
