"""Files of text and records: how they are listed, opened, decoded and counted."""
