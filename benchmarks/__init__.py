"""Side-by-side measurement of all-reduces: the ring, its peers and the memory limit, in one interleaved run."""
