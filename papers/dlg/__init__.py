"""Deep leakage from gradients, and what each method of the library leaks."""
