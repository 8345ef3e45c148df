"""The HTTP side: who may ask, what is answered, and events that are pushed."""
