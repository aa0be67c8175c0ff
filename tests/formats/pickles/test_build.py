"""Pickles into trees: plain data as pickle reads them, everything else inert, hostile bytes refused, nothing run."""

import collections
import copyreg
import datetime
import enum
import io
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.core.errors import Damaged
from ckptctl.core.values import Global, OrderedPairs, Record
from ckptctl.formats.pickles.build import load
from ckptctl.formats.pickles.nodes import PersistentId, SizeTuple
from tests.support.checkpoints import ROOT
from tests.support.metadata import METADATA, metadata_pickle
from tests.support.unpickle import read_or_refuse, unpickle

PROTOCOLS = range(6)

atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.binary()
plain = st.recursive(
    atoms | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(keys)
        | st.frozensets(keys)
    ),
    max_leaves=30,
)


def tree(data, **options):
    return load(data, "f", **options).tree


@given(plain, st.sampled_from(PROTOCOLS))
def test_plain_data_are_read_as_pickle_reads_them(value, protocol):
    data = pickle.dumps(value, protocol)
    found = load(data, "f")
    assert found.tree == value
    assert repr(found.tree) == repr(unpickle(data))
    assert found.stop == len(data)


@given(plain)
def test_the_pure_python_pickler_is_read_too(value):
    for protocol in PROTOCOLS:
        out = io.BytesIO()
        pickle._Pickler(out, protocol).dump(value)
        assert tree(out.getvalue()) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_special_floats_keep_their_bits(protocol):
    odd = [
        struct.unpack("<d", b)[0] for b in (b"\x00" * 7 + b"\x80", b"\x01\0\0\0\0\0\xf8\x7f", b"\0\0\0\0\0\0\xf0\xff")
    ]
    got = tree(pickle.dumps(odd, protocol))
    if protocol:
        assert [struct.pack("<d", x) for x in got] == [struct.pack("<d", x) for x in odd]
    else:
        assert repr(got) == repr(odd)


class Plain:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class Slots:
    __slots__ = ("a",)


class Listing(list):
    pass


class Mapping(dict):
    pass


class WithKwargs:
    def __getnewargs_ex__(self):
        return (1,), {"b": 2}

    def __new__(cls, a, *, b):
        return super().__new__(cls)


class Color(enum.Enum):
    RED = 3


class Outer:
    class Inner:
        pass


Pair = collections.namedtuple("Pair", "x y")
HERE = __name__


@pytest.mark.parametrize("protocol", range(2, 6))
def test_objects_become_records_with_their_state(protocol):
    got = tree(pickle.dumps(Plain(a=1, b=[2]), protocol))
    assert (got.cls, got.how, got.args, got.state, got.has_state) == (
        f"{HERE}.Plain",
        "newobj",
        (),
        {"a": 1, "b": [2]},
        True,
    )
    empty = tree(pickle.dumps(Plain(), protocol))
    assert (empty.state, empty.has_state) == (None, False)
    slotted = Slots()
    slotted.a = 5
    assert tree(pickle.dumps(slotted, protocol)).state == (None, {"a": 5})
    assert tree(pickle.dumps(Pair(1, 2), protocol)).args == (1, 2)
    assert tree(pickle.dumps(Color.RED, protocol)).args == (3,)
    assert tree(pickle.dumps(Listing([1, 2]), protocol)).items == [1, 2]
    assert tree(pickle.dumps(Mapping(a=1, b=2), protocol)).pairs == [("a", 1), ("b", 2)]
    assert tree(pickle.dumps(collections.defaultdict(list, {"k": [1]}), protocol)).pairs == [("k", [1])]
    moment = tree(pickle.dumps(datetime.datetime(2020, 1, 2), protocol))
    assert (moment.cls, moment.args[0]) == ("datetime.datetime", b"\x07\xe4\x01\x02\0\0\0\0\0\0")


@pytest.mark.parametrize("protocol", [0, 1])
def test_objects_of_the_oldest_protocols_become_records(protocol):
    got = tree(pickle.dumps(Plain(a=1), protocol))
    assert got.cls == "copy_reg._reconstructor"
    assert (got.args[0], got.state) == (Global(HERE, "Plain"), {"a": 1})


def test_keyword_arguments_are_kept_in_every_protocol():
    new = tree(pickle.dumps(WithKwargs(1, b=2), 4))
    assert (new.how, new.args, new.kwargs) == ("newobj_ex", (1,), {"b": 2})
    by_call = b"\x80\x02ccopyreg\n__newobj_ex__\n(cm\nC\nK\x01\x85}X\x01\x00\x00\x00bK\x02st" + b"R."
    old = tree(by_call)
    assert (old.how, old.cls, old.args, old.kwargs) == ("newobj_ex", "m.C", (1,), {"b": 2})


def test_inst_and_obj_are_calls():
    inst = tree(b"(K\x01K\x02im\nC\n.")
    assert (inst.cls, inst.args, inst.how) == ("m.C", (1, 2), "reduce")
    obj = tree(b"(cm\nC\nK\x01o.")
    assert (obj.cls, obj.args) == ("m.C", (1,))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_ordered_dict_is_one_with_its_attributes(protocol):
    value = collections.OrderedDict(b=1, a=2)
    value._metadata = {"version": 1}
    got = tree(pickle.dumps(value, protocol))
    assert type(got) is OrderedPairs
    assert (list(got.items()), got.attributes) == ([("b", 1), ("a", 2)], {"_metadata": {"version": 1}})


def test_torch_size_is_a_tuple_that_remembers():
    got = tree(b"\x80\x02ctorch\nSize\nK\x02K\x03\x86\x85R.")
    assert type(got) is SizeTuple
    assert got == (2, 3)
    assert type(tree(b"\x80\x02ctorch\nSize\nK\x02N\x86\x85R.")) is Record


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sharing_and_cycles_are_kept(protocol):
    inner = [1]
    loop = [inner, inner]
    loop.append(loop)
    loop.append((loop,))
    got = tree(pickle.dumps(loop, protocol))
    assert got[0] is got[1]
    assert got[2] is got
    assert got[3][0] is got
    me = Plain()
    me.me = me
    got = tree(pickle.dumps(me, protocol))
    assert got.state["me"] is got


def test_memo_entries_count_as_cpython_counts_them():
    # BINPUT 1 before anything is at 0: MEMOIZE then numbers by how many there are.
    data = b"\x80\x04\x8c\x01aq\x01\x8c\x01b\x94h\x01h\x01\x87."
    assert tree(data) == unpickle(data)
    data = b"\x80\x04]q\x05q\x05\x8c\x01x\x94h\x01\x87."
    assert tree(data) == unpickle(data)


def test_names_that_would_run_code_run_nothing(tmp_path):
    target = tmp_path / "ran"
    command = f"touch {target}".encode()
    hostile = b"\x80\x02cos\nsystem\nX" + struct.pack("<I", len(command)) + command + b"\x85R."
    found = load(hostile, "f")
    assert not target.exists()
    assert found.tree.cls == "os.system"
    assert [str(f.name) for f in found.unsafe] == ["os.system"]
    assert "webbrowser" not in sys.modules
    load(b"\x80\x02cwebbrowser\nopen\n)R.", "f")
    assert "webbrowser" not in sys.modules


def test_persistent_ids_go_through_the_resolver():
    assert tree(b"\x80\x02K\x07Q.", persistent=lambda pid: ("got", pid)) == ("got", 7)
    assert tree(b"Pabc\n.", persistent=lambda pid: ("got", pid)) == ("got", "abc")
    left = tree(b"\x80\x02K\x07Q.")
    assert isinstance(left, PersistentId)
    assert left.pid == 7


def test_calls_of_the_caller_are_evaluated_and_may_decline():
    data = b"\x80\x02cm\nf\nK\x02\x85Rcm\nf\nN\x85R\x86."
    first, second = tree(data, rebuild={"m.f": lambda args: args[0] * 10 if args[0] else NotImplemented})
    assert first == 20
    assert (second.cls, second.args) == ("m.f", (None,))


@pytest.mark.parametrize("protocol", range(2, 6))
def test_known_classes_become_what_their_maker_says_everywhere(protocol):
    shared = Plain(a=1)
    twice = [shared, shared, {"x": shared}, Plain(a=2)]
    got = tree(pickle.dumps(twice, protocol), known={f"{HERE}.Plain": lambda state: ("compact", state["a"])})
    assert got == [("compact", 1), ("compact", 1), {"x": ("compact", 1)}, ("compact", 2)]
    assert got[0] is got[1] is got[2]["x"]


def test_a_known_class_as_a_key_may_be_hashed_by_its_maker():
    class_key = {Key("a"): 1, Key("b"): 2}
    got = tree(pickle.dumps(class_key, 4), known={f"{HERE}.Key": lambda state: ("key", state["name"])})
    assert got == {("key", "a"): 1, ("key", "b"): 2}


class Key:
    def __init__(self, name):
        self.name = name

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return self.name == other.name


def test_a_known_class_that_refers_to_itself_stays_readable():
    me = Plain(a=1)
    me.me = me
    got = tree(pickle.dumps(me, 4), known={f"{HERE}.Plain": lambda state: ("compact", state["a"])})
    assert got == ("compact", 1)


def test_a_maker_may_decline():
    got = tree(pickle.dumps([Plain(a=1)], 4), known={f"{HERE}.Plain": lambda state: NotImplemented})
    assert (got[0].cls, got[0].state) == (f"{HERE}.Plain", {"a": 1})


def test_a_known_class_without_state_is_refused_in_the_fused_run():
    data = b"\x80\x04\x8c\x01m\x8c\x01C\x93)\x81\x94}\x94(uK\x01\x87."
    with pytest.raises(Damaged, match="damaged"):
        tree(data, known={"m.C": lambda state: state})


def test_makers_that_fail_are_damage_of_the_file():
    with pytest.raises(Damaged):
        tree(pickle.dumps([Plain(a=1)], 4), known={f"{HERE}.Plain": lambda state: state["absent"]})


def test_sizes_are_shared_plain_tuples_where_classes_are_known():
    size = b"\x8c\x05torch\x8c\x04Size\x93K\x02K\x03\x86\x94\x85\x94R\x94"
    got = tree(b"\x80\x04" + size + size + b"\x86.", known={"m.C": lambda state: state})
    assert type(got[0]) is tuple
    assert got[0] is got[1]


BAD = {
    "unhashable key": b"\x80\x02}]K\x01s.",
    "unhashable element": b"\x80\x04\x8f(]\x90.",
    "underflow": b"\x80\x02R.",
    "no mark": b"\x80\x02K\x01t.",
    "odd items": b"\x80\x02}(K\x01u.",
    "memo never written": b"\x80\x02h\x05.",
    "call with no tuple": b"\x80\x02cm\nf\nK\x01R.",
    "append to a number": b"\x80\x02K\x01K\x02a.",
    "items into a list": b"\x80\x02]K\x01K\x02s.",
    "state on a list": b"\x80\x02]}b.",
    "state twice": b"\x80\x02cm\nC\n)\x81K\x01bK\x02b.",
    "nothing at stop": b"\x80\x02.",
    "global of no text": b"\x80\x04K\x01K\x02\x93.",
    "bad utf-8": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "bad int": b"Ix\n.",
    "bad float": b"Fx\n.",
    "bad string": b"Sx\n.",
    "bad escape": b"S'\\x'\n.",
    "bad unicode": b"V\\u12\n.",
    "put of a word": b"Npx\n.",
    "an int of a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "add to a list": b"\x80\x04](K\x01\x90.",
    "latin of what is not": b"\x80\x02c_codecs\nencode\nX\x03\x00\x00\x00\xe2\x82\xacX\x06\x00\x00\x00latin1\x86R.",
    "persid of no ascii": b"P\xff\n.",
}


@pytest.mark.parametrize("name", BAD)
def test_what_no_pickler_writes_is_damaged_with_its_place(name):
    with pytest.raises(Damaged) as err:
        load(BAD[name], "weights.bin")
    assert err.value.where == "weights.bin"
    assert "byte" in err.value.why


def test_a_tuple_that_takes_forever_to_hash_is_refused():
    bomb = b"\x80\x02K\x01" + b"2\x86" * 60
    begin = time.monotonic()
    with pytest.raises(Damaged, match="SETITEM"):
        tree(b"\x80\x02}" + bomb[2:] + b"Ns.")
    with pytest.raises(Damaged):
        tree(b"\x80\x04(" + bomb[2:] + b"\x91.")
    with pytest.raises(Damaged):
        tree(b"\x80\x02c__builtin__\nset\n]" + bomb[2:] + b"a\x85R.")
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("key", [True, False])
def test_deep_nesting_neither_crashes_nor_recurses(key):
    deep = b")" + b"\x85" * 200_000
    if key:
        with pytest.raises(Damaged):
            tree(b"\x80\x02}" + deep + b"Ns.")
    else:
        got, n = tree(b"\x80\x02" + deep + b"."), 0
        while got:
            got, n = got[0], n + 1
        assert n == 200_000
    lists = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    assert len(tree(lists)) == 1


def test_a_deep_size_does_not_overflow_the_stack_where_sizes_are_shared():
    deep = b"\x80\x02ctorch\nSize\n)" + b"\x85" * 200_000 + b"\x85R."
    assert isinstance(tree(deep, known={"m.C": lambda state: state}), Record)


def test_numbers_claimed_by_calls_take_no_memory():
    for call in (b"bytes", b"bytearray"):
        tracemalloc.start()
        got = tree(b"\x80\x02c__builtin__\n" + call + b"\nJ\xff\xff\xff\x7f\x85R.")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
        assert isinstance(got, Record)


def test_python_2_texts_are_text_where_they_are_utf_8():
    assert tree(b"U\x02\xc3\xa9.") == "é"
    assert tree(b"U\x01\xe9.") == b"\xe9"
    assert tree(b"T\x01\x00\x00\x00a.") == "a"


def test_globals_are_counted():
    found = load(pickle.dumps([Plain(), Color.RED, copyreg._reconstructor], 0), "f")
    assert found.globals[Global(HERE, "Plain")] == 1
    assert found.globals[Global("copy_reg", "_reconstructor")] == 1


@given(plain, st.integers(0, 5), st.data())
def test_mutated_pickles_are_read_or_refused(value, protocol, data):
    raw = bytearray(pickle.dumps([value, Plain(a=value), collections.OrderedDict(a=value)], protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    read_or_refuse(lambda: load(bytes(raw), "f"), "f")


SOUP = [bytes([c]) for c in b"NK\x01).]}(0123tuselaod\x85\x86\x87\x88\x89\x8f\x90\x91\x94\x93\x81\x92RbQ2"]
SOUP += [b"h\x00", b"q\x00", b"K\x05", b"\x8c\x01a", b"cm\nC\n", b"c__builtin__\nset\n", b"ccollections\nOrderedDict\n"]
SOUP += [b"c__builtin__\ngetattr\n"]
opcode_soup = st.lists(st.sampled_from(SOUP), max_size=60)


@given(opcode_soup)
def test_any_order_of_opcodes_is_read_or_refused(codes):
    read_or_refuse(lambda: load(b"\x80\x04" + b"".join(codes) + b".", "f"), "f")


MILLION = """
import resource, sys, time
from tests.support.metadata import FILESYSTEM, METADATA
from ckptctl.formats.pickles.build import load

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

known = {
    METADATA + ".MetadataIndex": lambda s: (s["fqn"], s.get("offset")),
    METADATA + ".ChunkStorageMetadata": lambda s: (s["offsets"], s["sizes"]),
    FILESYSTEM + "._StorageInfo": lambda s: s["offset"],
}
before, begin = peak(), time.process_time()
with open(sys.argv[1], "rb") as file:
    tree = load(file.read(), "f", known=known).tree
print(len(tree.state["storage_data"]), time.process_time() - begin, peak() - before)
"""


def test_the_synthetic_metadata_is_the_pickle_that_it_says():
    got = tree(metadata_pickle(tensors=3, chunks=4))
    assert got.cls == f"{METADATA}.Metadata"
    first = got.state["state_dict_metadata"]["model.layers.0.mlp.experts.down_proj.weight"]
    assert [c.state["offsets"] for c in first.state["chunks"]] == [(0, 0), (512, 0), (1024, 0), (1536, 0)]
    assert len(got.state["storage_data"]) == 12


@pytest.mark.bench
def test_a_million_chunks_are_read_within_the_budget(tmp_path):
    (tmp_path / "m").write_bytes(metadata_pickle(tensors=4000, chunks=250))
    done = subprocess.run(
        [sys.executable, "-c", MILLION, tmp_path / "m"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": "."},
    )
    chunks, seconds, nbytes = map(float, done.stdout.split())
    assert chunks == 1_000_000
    assert seconds < 60
    assert nbytes < 512 << 20
