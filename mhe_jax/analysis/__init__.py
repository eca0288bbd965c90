"""What a program costs, read from what the compiler makes of it; nothing is run."""
