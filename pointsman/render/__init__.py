"""Text, tables and pictures for people.

Enters: values of the rooms below. Leaves: text for a terminal, or SVG. The one rule: nothing reads what is rendered
here.
"""
