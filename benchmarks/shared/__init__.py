"""What all benchmarks share: the client, starting a server, provenance, estimates, pictures."""
