"""Private methods: what they add, what they spend, and how it is checked."""
