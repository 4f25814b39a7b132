"""Process groups: how ranks connect, which backend they use, and our own compiled collectives."""
