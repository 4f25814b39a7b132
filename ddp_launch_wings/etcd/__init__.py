"""Stores of the service in etcd, for any number of replicas."""
