"""Plans that are legal, ranked."""
