"""Does the faster one still train? Curves of runs that began alike, and whether one follows the other."""
