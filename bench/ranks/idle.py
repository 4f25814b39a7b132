"""A rank that is there, and does nothing."""

from stamp import stamp, wait_at_gate

stamp("line")
wait_at_gate()
