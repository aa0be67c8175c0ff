"""The command line: one thin module a command. Parses, calls one operation, shows its result.

No logic, no branch on formats.
"""
