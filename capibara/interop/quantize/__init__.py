"""Quantized weights of other frameworks: GPTQ, AWQ, bitsandbytes, MXFP4."""
