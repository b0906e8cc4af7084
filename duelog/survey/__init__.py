"""Facts of a store that check, audit, repair and Spark's audit share: records, runs, markers, what was withdrawn.

Owns how each is read and when it counts as whole. Knows no findings: what a fact means is judged by those who ask.
"""
