"""Labelled examples: from files, as they are distributed, to the official score.

table.py      which data sets there are: columns, labels, official metrics
records.py    files and TFDS to records        examples.py    records to texts and labels
rows.py       texts to rows of a batch         windows.py     questions and contexts to rows
batches.py    rows to batches                  scores.py      predictions to official metrics
answers.py    SQuAD's metrics                  submission.py  the files that the suites take
task.py       the tasks
"""
