"""The programs that the engine compiles."""
