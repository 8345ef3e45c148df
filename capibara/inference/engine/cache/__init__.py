"""What is kept of rows that were read: the pages of slots, and the beginnings of prompts."""
