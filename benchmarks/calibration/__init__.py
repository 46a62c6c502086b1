"""Calibration tried on real encoders that the product does not serve."""
