"""Measurements on a CUDA GPU."""
