"""Retention that holds a time to first token: measured work in, a fraction to keep out.

`controller`, `costs` and `state` know neither vLLM nor HTTP: arrivals, first tokens and the clock
go in, decisions come out. `keeper` and `metrics` connect them to a server.
"""
