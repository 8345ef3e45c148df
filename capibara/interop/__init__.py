"""Foreign models: their names, configurations and files, both ways."""
