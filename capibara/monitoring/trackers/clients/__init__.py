"""The trackers that come with capibara, one a file."""
