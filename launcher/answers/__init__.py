"""Answers what people ask about the ranks of this node, through the service (`ddpctl top`, `logs`, `stacks`)."""
