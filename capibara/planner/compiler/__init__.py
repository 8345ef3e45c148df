"""What the TPU compiler says of a plan."""
