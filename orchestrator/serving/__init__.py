"""Serving models with the nodes there are: the shells between the pure tables, the nodes' streams and whoever waits.

Sessions and the planner decide; these modules carry messages. Everything runs on one event loop, and no state changes
across an ``await`` without being looked at again.
"""
