"""Reading runs back: tables and curves."""
