"""`make bench-placement`: what places cost to find, and how full a fleet becomes."""
