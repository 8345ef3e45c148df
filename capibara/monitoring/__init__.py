"""Callbacks that show and record a run: metrics file, TensorBoard, progress line, curves."""
