"""The cost of a program, read from what the compiler makes of it; nothing is run."""
