from ranks import four_ranks, three_ranks, two_ranks

__all__ = ["four_ranks", "three_ranks", "two_ranks"]
