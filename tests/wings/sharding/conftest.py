from crews import crew_of

__all__ = ["crew_of"]
