"""Foreign models: names, configurations and files, to and from other frameworks."""
