"""Several processes as one run: they find each other, wait for each other, and stop together."""
