"""native/*.c in Python, for machines without a C compiler: the same command lines, the same lines in and out."""
