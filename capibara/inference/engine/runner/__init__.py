"""What an engine runs on the devices: its programs, prefill and decode."""
