"""Decoders without experts of today: rotary positions, RMSNorm, gated MLPs and their variants."""
