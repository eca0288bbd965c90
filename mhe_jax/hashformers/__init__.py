"""Embeddings of whole words by their hash, without a vocabulary (Xue and Aletras 2022)."""
