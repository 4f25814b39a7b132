"""Find the reason why ranks stall, are slower than their peers, or differ. Pure."""
