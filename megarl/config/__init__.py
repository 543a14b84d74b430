"""Settings: their schema, how they are read, checked and written, and what follows from them.

What follows: the layouts of both sides, a plan in words, and the record of how a run was started.
"""
