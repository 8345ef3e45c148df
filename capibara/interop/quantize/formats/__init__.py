"""How other frameworks store quantized weights: a file for each quant_method."""
