"""Process groups: how ranks find each other, which backend they use, and the compiled collectives of our own."""
