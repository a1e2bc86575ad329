"""Terminal output. Only this package and the command line use rich."""
