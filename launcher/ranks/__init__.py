"""The processes of the ranks: who starts them, with which environment, on which CPUs and devices."""
