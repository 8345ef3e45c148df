"""Policy losses on a model's own answers: ratios, surrogates (one file each), weights of tokens, and advantages."""
