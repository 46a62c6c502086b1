"""The first hour on a GPU: `make check-gpu` runs everything that a CPU cannot show."""
