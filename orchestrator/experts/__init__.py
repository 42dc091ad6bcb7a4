"""The experts of sessions that have them on hosts: who holds what, how it moves, and what happens when a host is lost.

Pure: what nodes and the planner say comes in, what hosts and trunk are to be told comes out.
"""
