"""``ring-reduce soak``: random calls and random faults for as long as one likes, every result checked.

Every rank derives the same plan from the seed (``plan``), so nothing has to be said between them. A run is a row of
episodes: the ranks make rings, call them, and meet one fault or none (``faults``). ``tensors`` and ``check`` make the
data and judge it, ``rank`` runs an episode, ``seat`` replaces a rank that was killed, ``judge`` compares what all ranks
tell, and ``report`` adds up. Importing this loads none of them.
"""
