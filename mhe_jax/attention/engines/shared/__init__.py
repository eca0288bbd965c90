"""Engines for heads that share one score matrix: softmax factors where only a bias differs."""
