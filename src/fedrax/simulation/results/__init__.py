"""Results of a simulation: events, progress, recorded messages."""
