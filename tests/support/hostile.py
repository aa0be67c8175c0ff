"""Pickles that would run code, and good ones beside them, as bytes: opcodes by hand, nothing is ever run here.

HOSTILE and GOOD map a file's name to its bytes. Every hostile one calls, imports or builds something harmful when it is
unpickled by Python, or before it turns out to be broken.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import zipfile
import zlib

CALLED = (
    "os.system", "posix.system", "nt.system", "subprocess.Popen", "subprocess.check_output", "builtins.eval",
    "builtins.exec", "builtins.compile", "builtins.__import__", "builtins.open", "builtins.breakpoint",
    "socket.socket", "webbrowser.open", "runpy.run_path", "pickle.loads", "_pickle.loads", "importlib.import_module",
    "shutil.rmtree", "requests.api.get", "http.client.HTTPSConnection", "sys.exit", "pty.spawn", "timeit.timeit",
    "cProfile.run", "profile.run", "pdb.run", "code.interact", "ctypes.CDLL", "asyncio.run", "torch.load",
    "torch.serialization.load", "torch.hub.load", "operator.attrgetter", "operator.methodcaller", "functools.partial",
    "pip.main", "pydoc.pipepager", "trace.Trace", "logging.FileHandler", "marshal.loads", "zipimport.zipimporter",
    "uuid._popen", "numpy.load", "numpy.testing._private.utils.runstring", "types.CodeType", "types.FunctionType",
    "urllib.request.urlopen", "multiprocessing.Process", "bdb.Bdb", "pkgutil.resolve_name", "ensurepip._run_pip",
    "doctest.debug_script", "imaplib.IMAP4_stream", "ssl.get_server_certificate", "_io.FileIO", "venv.create",
    "torch._inductor.codecache.compile_file", "torch.utils.collect_env.run", "cloudpickle.cloudpickle._make_function",
    "distutils.file_util.write_file", "lib2to3.pgen2.grammar.Grammar.loads", "idlelib.run.Executive.runcode",
    "_osx_support._read_output", "smtplib.SMTP", "ftplib.FTP",
)  # fmt: skip


def text(value: str) -> bytes:
    """SHORT_BINUNICODE."""
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


def by_name(dotted: str) -> bytes:
    """GLOBAL, as protocols below 4 write it."""
    module, _, name = dotted.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def stack_global(dotted: str) -> bytes:
    """STACK_GLOBAL of two texts."""
    module, _, name = dotted.rpartition(".")
    return text(module) + text(name) + b"\x93"


def archive(method: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    """A torch file of the given members, their dots written as __."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as made:
        for name, data in {"data__pkl": b"\x80\x02}.", "version": b"3\n", **members}.items():
            made.writestr(f"archive/{name.replace('__', '.')}", data)
    return out.getvalue()


def _forms() -> dict[str, bytes]:
    """os.system, called in every way that the opcodes allow."""
    call, popen = by_name("os.system"), by_name("subprocess.Popen")
    nested = text("os") + b"\x94" + text("system") + b"\x94"
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    objects = b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header
    # A name that is no text in one piece: both words are read back from the memo.
    from_memo = nested + b"00" + b"h\x00h\x01\x93"
    getter = by_name("builtins.getattr") + b"(" + by_name("os.path") + text("os") + b"tR"
    return {
        "reduce.pkl": call + b"(S'x'\ntR.",
        "inst.pkl": b"(S'x'\nios\nsystem\n.",
        "obj.pkl": b"(" + call + b"S'x'\no.",
        "newobj.pkl": b"\x80\x02" + by_name("subprocess.Popen") + b"(S'x'\nt\x81.",
        "newobj-ex.pkl": b"\x80\x04" + stack_global("subprocess.Popen") + text("x") + b"\x85}\x92.",
        "memo-names.pkl": b"\x80\x04" + from_memo + text("x") + b"\x85R.",
        "binput-names.pkl": b"\x80\x02U\x02osq\x05" + b"0" + b"U\x06systemq\x060h\x05h\x06\x93(S'x'\ntR.",
        "unicode-names.pkl": b"\x80\x04" + b"X\x02\0\0\0osX\x06\0\0\0system\x93" + text("x") + b"\x85R.",
        "in-list.pkl": b"](" + call + b"(S'x'\ntRe.",
        "as-key.pkl": b"}" + call + b"(S'x'\ntRI1\ns.",
        "as-state.pkl": b"\x80\x02ccollections\nOrderedDict\n)R}U\x01x" + call + b"(S'x'\ntRsb.",
        "popped.pkl": call + b"(S'x'\ntR0N.",
        "popped-by-mark.pkl": b"(" + call + b"(S'x'\ntR1N.",
        "in-frames.pkl": b"\x80\x04\x95\x30\0\0\0\0\0\0\0" + stack_global("os.system") + text("x") + b"\x85R.",
        "getattr-chain.pkl": getter + b"0" + by_name("builtins.getattr") + b"(" + by_name("os.path") + b"S'os'\ntR.",
        "reduce-of-getattr.pkl": b"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S'x'\ntR.",
        "map-of-system.pkl": b"cbuiltins\nlist\n(cbuiltins\nmap\n(" + call + b"(lS'x'\natRtR.",
        "copyreg.pkl": by_name("copyreg._reconstructor") + b"(" + popen + by_name("builtins.object") + b"NtR.",
        "second-pickle.pkl": b"\x80\x02}." + call + b"(S'x'\ntR.",
        "third-pickle.pkl": b"\x80\x02}.\x80\x02]." + call + b"(S'x'\ntR.",
        "cut-short.pkl": call + b"(S'x'\ntR",
        "broken-behind.pkl": call + b"(S'x'\ntR\xff\xff.",
        "unbalanced.pkl": call + b"(S'x'\ntRt.",
        "no-proto.bin": stack_global("os.system") + text("x") + b"\x85R.",
        "as-pytorch-model.bin": b"\x80\x02" + call + b"q\0X\x01\0\0\0xq\x01\x85q\x02Rq\x03.",
        "as-joblib.joblib": b"\x80\x04" + stack_global("os.system") + text("x") + b"\x85R.",
        "python-2-name.pkl": b"c__builtin__\neval\n(S'1'\ntR.",
        "long-name.pkl": b"\x80\x04\x8d\2\0\0\0\0\0\0\0os" + text("system") + b"\x93" + text("x") + b"\x85R.",
        "gzip.joblib": gzip.compress(call + b"(S'x'\ntR."),
        "zlib.joblib": zlib.compress(call + b"(S'x'\ntR."),
        "lzma.joblib": lzma.compress(call + b"(S'x'\ntR.", lzma.FORMAT_ALONE),
        "bz2.pkl": bz2.compress(call + b"(S'x'\ntR."),
        "objects.npy": objects + call + b"(S'x'\ntR.",
        "objects.npz": archive(arr__npy=objects + call + b"(S'x'\ntR."),
        "member-without-name.pt": archive(extra=b"\x80\x02" + call + b"(S'x'\ntR."),
        "looks-like-safetensors.pkl": b"\x80\x02X\x01\0\0\0{0" + call + b"(S'x'\ntR.",
        "begins-with-a-brace.bin": b"U\x06{}{}{}0" + call + b"(S'x'\ntR.",
        "plain.dat": call + b"(S'x'\ntR.",
        "plain.data": b"\x80\x04" + stack_global("os.system") + text("x") + b"\x85R.",
        "zip.pt": archive(data__pkl=b"\x80\x02" + call + b"(S'x'\ntR."),
        "zip-other-member.pt": archive(extra__pkl=call + b"(S'x'\ntR."),
        "zip-deflated.pt": archive(zipfile.ZIP_DEFLATED, data__pkl=b"\x80\x02" + call + b"(S'x'\ntR."),
        "zip-behind-first.pt": archive(data__pkl=b"\x80\x02" + call + b"(S'x'\ntR0}."),
    }  # fmt: skip


def _calls() -> dict[str, bytes]:
    """Each harmful name, called with one text, in protocols 0 and 4."""
    out: dict[str, bytes] = {}
    for dotted in CALLED:
        out[f"{dotted}.0.pkl"] = by_name(dotted) + b"(S'x'\ntR."
        out[f"{dotted}.4.pkl"] = b"\x80\x04" + stack_global(dotted) + text("x") + b"\x85R."
    return out


HOSTILE: dict[str, bytes] = {**_forms(), **_calls()}
_TENSOR = (
    b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00\x00storageq\x03"
    b"ctorch\nFloatStorage\nq\x04X\x01\x00\x00\x000q\x05X\x03\x00\x00\x00cpuq\x06K\x02tq\x07QK\x00K\x02\x85q\x08K\x01\x85"
    b"q\t\x89ccollections\nOrderedDict\nq\n)Rq\x0btq\x0cRq\rs."
)
GOOD: dict[str, bytes] = {
    "plain.pkl": b"\x80\x02}q\x00X\x01\x00\x00\x00aK\x01s.",
    "protocol-0.pkl": b"(dp0\nS'a'\np1\nI1\ns.",
    "ordered.pkl": b"\x80\x02ccollections\nOrderedDict\n)R.",
    "numbers.pkl": b"\x80\x04]\x94(K\x01G?\xf0\0\0\0\0\0\0\x88Ne.",
    "tensor.pt": archive(data__pkl=_TENSOR, **{"data/0": struct.pack("<2f", 1.0, 2.0)}),
    "tensor.bin": archive(data__pkl=_TENSOR, **{"data/0": struct.pack("<2f", 1.0, 2.0)}),
    "numbers.npy": b"\x93NUMPY\x01\0v\0"
    + b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }".ljust(117)
    + b"\n\0\0\0\0",
    "numbers.dat": bytes(range(256)) * 8,
    "plain.joblib": gzip.compress(b"\x80\x02}q\x00X\x01\x00\x00\x00aK\x01s."),
}
