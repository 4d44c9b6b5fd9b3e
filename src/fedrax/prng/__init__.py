"""Named random keys and random permutations."""
