"""What selection costs, beside one encoder layer."""
