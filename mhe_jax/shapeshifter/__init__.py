"""Matrices as sums of Kronecker products of smaller ones (Panahi, Saeedi and Arodz 2021)."""
