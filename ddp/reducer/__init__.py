"""From a gradient to its average: the wrapper, its hooks, buckets, the plan of the buckets, and one backward."""
