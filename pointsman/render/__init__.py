"""Text, tables and pictures for people.

Enters: reasons, graphs, fleets. Leaves: text for a terminal, Mermaid, DOT or SVG. The one rule: no code reads the
rendered text back.
"""
