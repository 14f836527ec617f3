"""Verdicts from measurements that are there already: comparison, divergence, prediction, kernels."""
