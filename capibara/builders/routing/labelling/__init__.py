"""What a record says, the domain that it belongs to, and how difficult it is."""
