"""How the ranks of this node are: what they say of themselves, and what can be seen of them from outside."""
