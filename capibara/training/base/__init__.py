"""What a run is: its configuration, state, strategy and callbacks, on which everything else of training is built."""
