"""Pieces as columns, and sizes of tensors and files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.core.dtype import BY_NAME, packed
from ckptctl.core.output import Fill, Late, OutputFile, Put, Region
from ckptctl.core.tensor import Key, Piece, PieceTable, Tensor, dense_strides
from tests.support.bruteforce import addresses
from tests.support.geometry import NUMELS, pieces

numels = st.sampled_from(NUMELS)


@given(numels.flatmap(pieces), st.integers(1, 5))
def test_a_table_gives_back_the_pieces_it_was_made_of(piece, count):
    rows = [piece] * count
    table = PieceTable.of(rows, 2)
    assert list(table) == rows
    assert len(table) == count
    assert table.nbytes == count * (3 * 8 * len(piece.view) + 4 + 8)


def test_a_table_without_strides_is_packed():
    table = PieceTable.of([Piece((4, 6), (0, 2), (3, 2), 1, 7, (4, 2))], 2)
    bare = PieceTable(table.view, 2, table.lo, table.size, table.source, table.start, None)
    assert list(bare) == list(table)


def test_tables_of_no_pieces_or_of_several_views_are_refused():
    a, b = Piece((6,), (0,), (6,), 0, 0, (1,)), Piece((2, 3), (0, 0), (2, 3), 0, 0, (3, 1))
    with pytest.raises(ValueError, match="one view"):
        PieceTable.of([a, b], 1)
    with pytest.raises(ValueError, match="one view"):
        PieceTable.of([], 1)


def test_a_whole_tensor_is_one_piece():
    assert list(PieceTable.whole((2, 3), 4, 5, 10)) == [Piece((2, 3), (0, 0), (2, 3), 5, 10, (12, 4))]
    assert list(PieceTable.whole((2, 3), 4, 5, 10, (4, 8))) == [Piece((2, 3), (0, 0), (2, 3), 5, 10, (4, 8))]
    assert list(PieceTable.whole((), 4, 0, 0)) == [Piece((), (), (), 0, 0, ())]
    assert Piece((2, 3), (0, 0), (2, 3), 5, 10, (4, 8)).numel == 6


@given(st.lists(st.integers(1, 4), max_size=3).map(tuple))
def test_dense_strides_lay_elements_side_by_side(size):
    count = len(list(addresses(0, size, dense_strides(size, 3)).ravel()))
    assert addresses(0, size, dense_strides(size, 3)).ravel().tolist() == [3 * i for i in range(count)]


def test_sizes_of_tensors():
    t = Tensor(Key("t"), BY_NAME["bfloat16"], (3, 5), ())
    assert (t.numel, t.nbytes, t.shown) == (15, 30, (3, 5))
    assert Tensor(Key("t"), BY_NAME["bfloat16"], (), ()).nbytes == 2
    four = Tensor(Key("t"), packed(BY_NAME["float4_e2m1fn_x2"]), (4,), (), logical=(2, 4))
    assert (four.nbytes, four.shown) == (4, (2, 4))


def test_types_of_less_than_a_byte_have_no_item_size():
    with pytest.raises(ValueError, match="not whole bytes"):
        _ = BY_NAME["float4_e2m1fn_x2"].itemsize
    with pytest.raises(ValueError, match="not whole bytes"):
        BY_NAME["float4_e2m1fn_x2"].nbytes((3,))
    assert BY_NAME["float4_e2m1fn_x2"].nbytes((2, 3)) == 3


def test_a_file_is_its_segments_back_to_back():
    made = []

    def make():
        made.append(1)
        return [
            Put(b"abc"),
            Region(Key("t"), BY_NAME["float32"], (4, 4), (0, 0), (2, 3)),
            Fill(5, b"\0", "alignment"),
            Late(7, (0,), lambda crcs: b"-" * 7),
        ]

    file = OutputFile("f", make)
    assert made == []
    assert file.starts == (0, 3, 27, 32, 39)
    assert file.nbytes == 39
    assert made == [1]
    assert OutputFile("empty", list).nbytes == 0
