"""Arrays of Zarr folders and OCDBT stores."""
