"""Training sets from logs of executed code: E2B's code interpreter, its commands, and interactive sessions in documentation."""
