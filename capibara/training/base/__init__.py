"""What a run is: its options, state, gradient, interfaces of nodes and groups, and callbacks, on which everything else of training is built."""
