"""Stores for the state of jobs: in memory, in a file, or in etcd."""
