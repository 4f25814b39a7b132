from ranks import three_ranks, two_ranks

__all__ = ["three_ranks", "two_ranks"]
