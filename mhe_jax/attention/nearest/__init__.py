"""From heads to the nearest parameters of a kind: what each kind's `nearest` is made of.

heads.py     attention as plain heads, which each kind's `heads` gives
scores.py    scores and values in coordinates in which all differences count the same
factors.py   the best factors that several heads can share

A kind's parameters minimize the differences of scores, `Σ_h ‖L (F[h] - F'[h]) P‖²`, and of what is
added to the output, `Σ_h ‖P' (A[h] - A'[h])‖²`, where F are `Heads.forms`, A are `Heads.maps`, and
LᵀL, PP and P'P' are the moments of the inputs. Only these products matter: any invertible map of a
head's keys that its queries undo, or of its values that W_o undoes, leaves a head as it is, and so
does another order of the heads.
"""
