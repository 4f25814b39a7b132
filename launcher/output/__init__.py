"""Output of the ranks: reads it, splits it into lines, keeps it in files, shows it on the terminal."""
