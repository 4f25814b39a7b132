"""The health of this node and its ranks: what the ranks report, and what the agent observes."""
