"""The command line: one module per command; nothing is computed here."""
