"""The contract between a method and what runs it, and the parts that methods are built from."""
