"""The gradient reducer: wrapper module, hooks, buckets, bucket plan, and the code that runs during a backward."""
