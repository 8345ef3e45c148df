"""How stored codes and scales become values, whatever the format."""
