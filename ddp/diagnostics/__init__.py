"""What observes or tunes the reducer: traces, numerical checks, and the search for a bucket size."""
