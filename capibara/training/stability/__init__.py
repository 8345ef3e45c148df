"""What keeps a run going: losses that jump, numbers that are not finite, steps that hang."""
