"""The public face for other processes: `duelog.connect(path)` gives a store that another process has open.

Its classes are those of the face, so a program takes either. Each method is made from the row of the table
(`duelog/operations/face_table.py`) that offers it; written out are those that wait, number what they send, or make
another object. This room knows nothing of what a store is made of.
"""
