"""The words of `capibara prepare`: one module each, with `main(argv) -> int`."""
