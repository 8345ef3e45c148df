"""Python's door: a model as an object, its data, and a function for each verb of the command line."""
