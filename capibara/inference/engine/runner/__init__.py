"""The programs of an engine on the devices: prefill and decode."""
