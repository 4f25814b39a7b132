"""Completion of our commands in bash, zsh, fish and tcsh."""
