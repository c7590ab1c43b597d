"""Programs for environments without streamlearn: each is a file of its own and imports nothing from here."""
