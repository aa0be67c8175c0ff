"""The command line: one thin module a command. Parses, calls one operation, shows its result; no logic, no branch on formats."""
