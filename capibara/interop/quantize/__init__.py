"""Weights in few bits: GPTQ, AWQ, bitsandbytes."""
