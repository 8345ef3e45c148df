"""What everything else stands on: types, trees, limits, devices, processes that speak to each other."""
