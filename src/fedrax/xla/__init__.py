"""Helpers inside compiled programs: quadratic programs, random orders, rewritten products, names for profiles."""
