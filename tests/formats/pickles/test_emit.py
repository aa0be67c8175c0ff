"""Trees into pickles: the bytes that CPython's own pickler writes, read again to the same tree."""

import collections
import pickle
import pickletools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import Unsupported
from ckptctl.core.values import Global, OrderedPairs, Record, Storage, TensorRef
from ckptctl.formats.pickles import arrays
from ckptctl.formats.pickles.build import load
from ckptctl.formats.pickles.emit import StorageKeys, dump
from ckptctl.formats.pickles.nodes import NumpyArray, PersistentId, SizeTuple
from tests.support.trees import difference
from tests.support.unpickle import unpickle

# Empty bytes are written otherwise, see emit.py.
atoms = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(min_size=1) | st.complex_numbers()
)
keys = st.none() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
ordered = st.recursive(
    atoms | st.binary().map(bytearray),
    lambda inner: st.lists(inner) | st.lists(inner, max_size=5).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=30,
)


def again(tree):
    return load(dump(tree), "f", rebuild=arrays.REBUILD, finish=arrays.FINISH).tree


@given(ordered)
def test_the_bytes_are_those_of_cpythons_pickler(value):
    assert dump(value) == pickle.dumps(value, 2)


@given(ordered | st.sets(keys) | st.frozensets(st.integers()))
def test_what_is_written_is_read_again(value):
    tree = load(pickle.dumps(value, 4), "f").tree
    data = dump(tree)
    assert difference(again(tree), tree) == ""
    if not isinstance(value, (set, frozenset)):  # equal sets may be in another order
        assert dump(again(tree)) == data
        assert repr(unpickle(data)) == repr(value)


# Not 1000: CPython then adds an empty batch to a dict.
@pytest.mark.parametrize("n", [0, 1, 2, 999, 1001, 2001])
def test_batches_are_cpythons(n):
    for value in (list(range(n)), dict.fromkeys(range(n)), tuple(range(n)), collections.OrderedDict.fromkeys(range(n))):
        tree = OrderedPairs(value) if isinstance(value, collections.OrderedDict) else value
        assert dump(tree) == pickle.dumps(value, 2)


@pytest.mark.parametrize(
    "n",
    [
        0,
        255,
        256,
        65535,
        65536,
        2**31 - 1,
        2**31,
        -1,
        -(2**31),
        -(2**31) - 1,
        -128,
        2**63,
        -(2**63),
        2**2039,
        2**5000,
        -(2**5000),
    ],
)
def test_integers_are_written_as_cpython_writes_them(n):
    assert dump(n) == pickle.dumps(n, 2)


def test_only_opcodes_of_protocol_2_are_used():
    tree = [
        b"x",
        b"",
        bytearray(b"y"),
        {1},
        frozenset({2}),
        2**100,
        "é\ud800",
        SizeTuple((1,)),
        Record(Global("m", "C"), how="newobj", kwargs=None),
    ]
    assert all(op.proto <= 2 for op, _, _ in pickletools.genops(dump(tree)))


class Listing(list):
    pass


class Mapping(dict):
    pass


class Plain:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class WithKwargs:
    def __new__(cls, a, *, b):
        made = super().__new__(cls)
        made.ab = a, b
        return made

    def __getnewargs_ex__(self):
        return self.ab[:1], {"b": self.ab[1]}


class Outer:
    class Inner:
        pass


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_objects_come_back_to_life_in_a_real_unpickler(protocol):
    listing, mapping = Listing([1, 2]), Mapping(a=1)
    listing.extra = mapping
    value = [
        Plain(a=listing, b=listing),
        mapping,
        collections.defaultdict(list, k=[1]),
        collections.Counter("aab"),
        WithKwargs(1, b=2),
    ]
    got = unpickle(dump(load(pickle.dumps(value, protocol), "f").tree))
    assert type(got[0]) is Plain
    assert got[0].a is got[0].b
    assert got[0].a.extra is got[1]
    assert got[1:4] == value[1:4]
    assert got[4].ab == (1, 2)


def test_protocol_2_objects_are_the_same_bytes_again():
    value = [
        Plain(one=1),
        Plain(),
        Listing(),
        Listing([1]),
        Listing([1, 2]),
        Mapping(),
        Mapping(one=1),
        Mapping(one=1, two=2),
    ]
    value += [collections.defaultdict(list, key=[1]), collections.Counter([10, 10, 20]), value]
    data = pickle.dumps(value, 2)
    assert dump(load(data, "f").tree) == data


def test_a_nested_class_is_found_by_getattr():
    data = dump(load(pickle.dumps([Outer.Inner(), Outer.Inner()], 4), "f").tree)
    got = unpickle(data)
    assert [type(x) for x in got] == [Outer.Inner, Outer.Inner]


def test_cycles_are_kept():
    inner = []
    loop = (inner, 1, 2, 3)
    inner.append(loop)
    record = Record(Global("m", "f"), (inner,))
    record.items.append(record)
    inner.append(record)
    tree = [loop, inner, record]
    assert difference(again(tree), tree) == ""
    through = []
    caught = Record(Global("m", "f"), (through,), items=[1, 2])
    through.append(caught)
    assert difference(again([caught, through]), [caught, through]) == ""


def test_a_cycle_that_no_pickle_can_hold_is_refused():
    record = Record(Global("m", "f"))
    record.args = (record,)
    with pytest.raises(Unsupported, match="contains itself"):
        dump(record)


def test_deep_trees_do_not_recurse():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert dump(deep).count(b"]") >= 100_000


def test_what_is_no_tree_is_refused():
    with pytest.raises(Unsupported, match="type Decimal"):
        dump([__import__("decimal").Decimal(1)])
    with pytest.raises(Unsupported, match="place for its bytes"):
        dump(Storage("0", BY_NAME["float32"], 1))


def test_a_set_is_written_in_an_order_that_does_not_depend_on_hashes():
    assert dump({"b", "a", "c", 3, None}) == dump({None, 3, "c", "a", "b"})


def test_persistent_ids_are_written_back():
    got = load(dump([PersistentId(("x", 1))]), "f").tree
    assert got[0].pid == ("x", 1)


@pytest.mark.parametrize("code", ["?", "i1", "<i2", "<i8", "u1", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"])
@pytest.mark.parametrize("order", "CF")
def test_numpy_arrays_are_arrays_and_come_back_to_numpy(code, order):
    value = np.asarray(np.arange(6).reshape(2, 3), dtype=code, order=order)
    data = pickle.dumps([value, value, value[:1], value[0, 1]], 2)
    tree = load(data, "f", rebuild=arrays.REBUILD, finish=arrays.FINISH).tree
    assert isinstance(tree[0], NumpyArray)
    assert tree[0] is tree[1]
    assert (tree[0].shape, tree[0].data, tree[0].fortran) == ((2, 3), value.tobytes("C"), order == "F")
    assert (tree[3].scalar, tree[3].data) == (True, value[0, 1].tobytes())
    assert difference(again(tree), tree) == ""
    got = unpickle(dump(tree))
    assert all(
        np.array_equal(g, v) and g.dtype == v.dtype
        for g, v in zip(got, [value, value, value[:1], value[0, 1]], strict=True)
    )
    assert got[0].flags["F_CONTIGUOUS"] == value.flags["F_CONTIGUOUS"]
    assert dump(tree) == data


@pytest.mark.parametrize(
    "value",
    [np.array(["a"]), np.array([None]), np.array([1], ">i4"), np.zeros(1, [("x", "i4")]), np.ma.masked_array([1])],
    ids=str,
)
def test_other_arrays_stay_records_and_come_back_too(value):
    tree = load(pickle.dumps([value], 2), "f", rebuild=arrays.REBUILD, finish=arrays.FINISH).tree
    assert isinstance(tree[0], Record)
    assert difference(again(tree), tree) == ""
    got = unpickle(dump(tree))[0]
    expected = unpickle(pickle.dumps(value, 2))
    assert (got.dtype, got.tolist()) == (expected.dtype, expected.tolist())


def storage(key="0", dtype="float32", numel=6):
    return Storage(key, BY_NAME[dtype] if dtype else None, numel)


def test_storages_are_numbered_by_first_appearance():
    one, two = storage("x"), storage("y", "int64")
    f32, i64 = BY_NAME["float32"], BY_NAME["int64"]
    ref = TensorRef(two, i64, 0, (6,), (1,))
    order = StorageKeys()
    dump(
        {"a": ref, "b": TensorRef(one, f32, 1, (2, 2), (2, 1)), "c": ref, "d": TensorRef(two, i64, 2, (1,), (1,))},
        order,
    )
    assert order.order == [two, one]


def test_a_dtype_that_its_storage_contradicts_is_refused():
    with pytest.raises(Unsupported, match="int64 over a storage of float32"):
        dump(TensorRef(storage(), BY_NAME["int64"], 0, (1,), (1,)), StorageKeys())


def test_empty_bytes_and_arrays_come_back():
    for value in (b"", np.zeros((0, 3))):
        tree = load(pickle.dumps(value, 2), "f", rebuild=arrays.REBUILD, finish=arrays.FINISH).tree
        got = unpickle(dump(tree))
        assert np.array_equal(got, value)
