"""Files on disks, in buckets and other stores: listed, read by ranges with retries, copied to this machine."""
