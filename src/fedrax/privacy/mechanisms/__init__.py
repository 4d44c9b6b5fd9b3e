"""Private forms of any method: wrappers that bound what a round lets out of a client's data, and cover it in noise."""
