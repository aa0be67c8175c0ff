"""The opcodes of pickle protocols 0 to 5, as a table: name, and how long the operand is. Nothing runs here.

Source: CPython 3.13, Lib/pickletools.py, opcodes.
"""

from __future__ import annotations

from typing import NamedTuple

LINE, TWO_LINES = -1, -2
"""Operands that are text up to a newline, or up to the second one."""


class Opcode(NamedTuple):
    """One opcode. operand is its bytes (or LINE, TWO_LINES); counted, how many of them say how much follows."""

    name: str
    operand: int = 0
    counted: int = 0


OPCODES: dict[int, Opcode] = {
    ord(code): Opcode(name, operand, counted)
    for code, name, operand, counted in (
        ("I", "INT", LINE, 0),
        ("J", "BININT", 4, 0),
        ("K", "BININT1", 1, 0),
        ("M", "BININT2", 2, 0),
        ("L", "LONG", LINE, 0),
        ("\x8a", "LONG1", 1, 1),
        ("\x8b", "LONG4", 4, 4),
        ("S", "STRING", LINE, 0),
        ("T", "BINSTRING", 4, 4),
        ("U", "SHORT_BINSTRING", 1, 1),
        ("B", "BINBYTES", 4, 4),
        ("C", "SHORT_BINBYTES", 1, 1),
        ("\x8e", "BINBYTES8", 8, 8),
        ("\x96", "BYTEARRAY8", 8, 8),
        ("V", "UNICODE", LINE, 0),
        ("X", "BINUNICODE", 4, 4),
        ("\x8c", "SHORT_BINUNICODE", 1, 1),
        ("\x8d", "BINUNICODE8", 8, 8),
        ("F", "FLOAT", LINE, 0),
        ("G", "BINFLOAT", 8, 0),
        ("N", "NONE", 0, 0),
        ("\x88", "NEWTRUE", 0, 0),
        ("\x89", "NEWFALSE", 0, 0),
        ("]", "EMPTY_LIST", 0, 0),
        ("a", "APPEND", 0, 0),
        ("e", "APPENDS", 0, 0),
        ("l", "LIST", 0, 0),
        (")", "EMPTY_TUPLE", 0, 0),
        ("t", "TUPLE", 0, 0),
        ("\x85", "TUPLE1", 0, 0),
        ("\x86", "TUPLE2", 0, 0),
        ("\x87", "TUPLE3", 0, 0),
        ("}", "EMPTY_DICT", 0, 0),
        ("d", "DICT", 0, 0),
        ("s", "SETITEM", 0, 0),
        ("u", "SETITEMS", 0, 0),
        ("\x8f", "EMPTY_SET", 0, 0),
        ("\x90", "ADDITEMS", 0, 0),
        ("\x91", "FROZENSET", 0, 0),
        ("0", "POP", 0, 0),
        ("2", "DUP", 0, 0),
        ("(", "MARK", 0, 0),
        ("1", "POP_MARK", 0, 0),
        ("g", "GET", LINE, 0),
        ("h", "BINGET", 1, 0),
        ("j", "LONG_BINGET", 4, 0),
        ("p", "PUT", LINE, 0),
        ("q", "BINPUT", 1, 0),
        ("r", "LONG_BINPUT", 4, 0),
        ("\x94", "MEMOIZE", 0, 0),
        ("\x82", "EXT1", 1, 0),
        ("\x83", "EXT2", 2, 0),
        ("\x84", "EXT4", 4, 0),
        ("c", "GLOBAL", TWO_LINES, 0),
        ("\x93", "STACK_GLOBAL", 0, 0),
        ("R", "REDUCE", 0, 0),
        ("b", "BUILD", 0, 0),
        ("i", "INST", TWO_LINES, 0),
        ("o", "OBJ", 0, 0),
        ("\x81", "NEWOBJ", 0, 0),
        ("\x92", "NEWOBJ_EX", 0, 0),
        ("\x80", "PROTO", 1, 0),
        (".", "STOP", 0, 0),
        ("\x95", "FRAME", 8, 0),
        ("P", "PERSID", LINE, 0),
        ("Q", "BINPERSID", 0, 0),
        ("\x97", "NEXT_BUFFER", 0, 0),
        ("\x98", "READONLY_BUFFER", 0, 0),
    )
}

CODE: dict[str, int] = {opcode.name: code for code, opcode in OPCODES.items()}
"""The byte of each opcode, by name."""

REFUSED: dict[str, str] = {
    "EXT1": "it names an object by a number of the writer's own registry (copyreg.add_extension)",
    "EXT2": "it names an object by a number of the writer's own registry (copyreg.add_extension)",
    "EXT4": "it names an object by a number of the writer's own registry (copyreg.add_extension)",
    "NEXT_BUFFER": "its bytes were handed over outside the pickle and are not in the file",
    "READONLY_BUFFER": "its bytes were handed over outside the pickle and are not in the file",
}
"""Opcodes that are legitimate and cannot be read from a file alone, and why."""
