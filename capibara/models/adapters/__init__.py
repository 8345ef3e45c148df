"""Low-rank adapters beside frozen weights, which may be quantized."""
