"""What every API of the server needs: the model, its limits, and errors."""
