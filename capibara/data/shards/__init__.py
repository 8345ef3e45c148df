"""Large corpora in shards, local or in a bucket, read in blocks: which there are, what is in one, in which order they come."""
