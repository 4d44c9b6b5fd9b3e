"""A federation of clients that hold handwritten digits."""
