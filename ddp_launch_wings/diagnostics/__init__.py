"""Tools that observe or tune the reducer: traces, numerical checks, and the search for bucket sizes."""
