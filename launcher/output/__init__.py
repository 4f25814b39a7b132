"""What ranks print: read, split into lines, kept in files, shown on the terminal."""
