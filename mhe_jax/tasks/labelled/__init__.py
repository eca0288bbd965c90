"""Labelled examples: from records to the official score.

table.py      which data sets there are: fields, labels, official metrics
examples.py   records to texts and labels      windows.py     questions and contexts to rows
rows.py       texts to rows of a batch         scores.py      predictions to official metrics
batches.py    rows to batches                  submission.py  the files that the suites take
answers.py    SQuAD's metrics                  task.py        the tasks
"""
