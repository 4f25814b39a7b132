"""Connecting to the rendezvous: finds its address, opens the session, collects the data that this node sends."""
