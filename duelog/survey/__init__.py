"""Facts of a store that check, audit and repair share: records, runs, markers, what was withdrawn.

Owns how each is read and when it counts as whole. Knows no findings: what a fact means is judged by those who ask.
"""
