"""Large corpora in shards, local or in a bucket, which are read in blocks: the index, the file formats, the source."""
