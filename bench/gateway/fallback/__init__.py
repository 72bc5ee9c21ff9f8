"""native/*.c in Python, for machines without a C compiler, with the same command lines, input and output."""
