"""`python -m ddp.elastic`: look at commits, verify them, and export them."""
