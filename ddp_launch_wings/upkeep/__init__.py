"""Looks after a rendezvous service for years: doctor, backup, restore and compact of `ddp-rendezvous`."""
