"""Verdicts on names: what would run code is dangerous, what frameworks pickle is known, the rest unknown."""

import pickle

import pytest

from ckptctl.core.values import Global, Record
from ckptctl.formats.pickles.build import load
from ckptctl.formats.pickles.danger import is_inert_getattr, verdict


def names(text: str) -> list[str]:
    return text.split()


DANGEROUS = names(
    """
    os.system posix.system nt.system os.path.expanduser subprocess.Popen subprocess.check_output builtins.eval
    builtins.exec builtins.compile builtins.open io.open _io.open _io.FileIO builtins.__import__
    __builtin__.eval __builtin__.apply builtins.getattr builtins.setattr importlib.import_module
    runpy.run_module pty.spawn socket.socket shutil.rmtree webbrowser.open pickle.loads _pickle.loads
    cPickle.loads ctypes.CDLL code.InteractiveInterpreter codeop.compile_command pdb.run timeit.timeit
    cProfile.run bdb.Bdb.run asyncio.run multiprocessing.Process operator.attrgetter _operator.methodcaller
    functools.partial types.FunctionType types.CodeType torch.load torch.hub.load torch.jit.load
    torch.storage._load_from_bytes torch.utils.cpp_extension.load_inline numpy.load
    numpy.testing._private.utils.runstring requests.get urllib.request.urlopen http.client.HTTPConnection
    ftplib.FTP smtplib.SMTP tempfile.NamedTemporaryFile pip.main pip._internal.main venv.create
    ensurepip.bootstrap distutils.spawn.spawn commands.getoutput sys.exit sys.modules marshal.loads
    logging.config.dictConfig pydoc.locate idlelib.pyshell.ModifiedInterpreter
    lib2to3.pgen2.pgen.ParserGenerator torch._dynamo.guards.GuardBuilder.get
    torch._inductor.codecache.compile_file doctest.debug_script trace.Trace.run profile.Profile.run
    uuid._load_system_functions numpy.f2py.crackfortran.getlincoef joblib.load dill.loads
    """
)
KNOWN = names(
    """
    collections.OrderedDict collections.defaultdict argparse.Namespace enum.Enum datetime.datetime
    pathlib.PosixPath pathlib._local.PosixPath numpy.dtype numpy.ndarray numpy._core.multiarray._reconstruct
    numpy.core.multiarray.scalar torch.FloatStorage torch.float32 torch.bfloat16 torch.Size torch.device
    torch.float8_e4m3fn torch._utils._rebuild_tensor_v2 torch._tensor._rebuild_from_type_v2
    torch.nn.parameter.Parameter torch.distributed.checkpoint.metadata.Metadata
    torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING torch.distributed.tensor.DTensor
    torch.distributed.checkpoint.filesystem._StorageInfo torch.distributed._mesh_layout._FlatLayout
    deepspeed.runtime.fp16.loss_scaler.LossScaler megatron.core.transformer.enums.AttnBackend
    transformers.training_args.TrainingArguments accelerate.state.PartialState signal.Signals
    pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint lightning.fabric.wrappers.X
    peft.utils.peft_types.PeftType omegaconf.dictconfig.DictConfig builtins.set __builtin__.set _codecs.encode
    _io.BytesIO __torch__.torch.nn.Linear torch.serialization._get_layout
    """
)
UNKNOWN = names(
    """
    torch._utils._rebuild_tensor_vX mypackage.Model __main__.Config torch.nn.functional.whatever
    transformers.pipelines.run_it numpy.core.foo
    """
)


def split(dotted):
    module, _, name = dotted.rpartition(".")
    return Global(module, name)


@pytest.mark.parametrize("dotted", DANGEROUS)
def test_what_runs_code_is_dangerous(dotted):
    assert verdict(split(dotted)) == "dangerous"


@pytest.mark.parametrize("dotted", KNOWN)
def test_what_frameworks_pickle_is_known(dotted):
    assert verdict(split(dotted)) == "known"


@pytest.mark.parametrize("dotted", UNKNOWN)
def test_anything_else_is_unknown(dotted):
    assert verdict(split(dotted)) == "unknown"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.serialization", "os.system"),
        ("torch.serialization", "os"),
        ("torch", "serialization.os.system"),
        ("collections", "OrderedDict.__class__"),
        ("torch", "Tensor.__init__.__globals__"),
        ("transformers.training_args", "TrainingArguments.__subclasses__"),
        ("builtins", "str.__class__.__base__.__subclasses__"),
        ("torch.nn", "Module.__getattribute__"),
    ],
)
def test_a_framework_is_no_way_around(module, name):
    assert verdict(Global(module, name)) == "dangerous"


def test_getattr_of_an_inert_record_or_a_known_class_is_safe():
    assert is_inert_getattr(
        (Global("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"), "TORCH_CONTIGUOUS_FORMAT")
    )
    assert is_inert_getattr((Record(Global("torch.x", "Enum"), (1,)), "NAME"))


@pytest.mark.parametrize(
    "args",
    [
        (Global("os", "path"), "system"),
        (Global("builtins", "object"), "x"),
        (Global("mypackage", "Model"), "run"),
        (Global("torch", "serialization"), "load"),
        (Global("torch.nn", "Module"), "__class__"),
        (Global("torch.nn", "Module"), "os"),
        (Record(Global("mypackage", "Model"), ()), "run"),
        (Global("torch.nn", "Module"), 5),
        ("text", "format"),
        (Global("torch.nn", "Module"),),
        (),
    ],
)
def test_getattr_of_anything_else_is_not(args):
    assert not is_inert_getattr(args)


GETATTR = b"\x80\x02c__builtin__\ngetattr\n"


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def unsafe(data):
    return [str(f.name) for f in load(data, "f").unsafe]


def test_a_file_with_getattr_is_judged_by_its_calls():
    assert unsafe(GETATTR + b"ctorch.x\nEncoding\n" + text("CONTIGUOUS") + b"\x86R.") == []
    assert unsafe(GETATTR + b"cmypackage\nx\n" + text("run") + b"\x86R.") == ["__builtin__.getattr"]
    # What getattr found is called: a method, not a class.
    assert unsafe(GETATTR + b"ctorch.x\nThing\n" + text("run_it") + b"\x86R)R.") == ["__builtin__.getattr"]
    assert unsafe(GETATTR + b"ctorch.x\nThing\n" + text("Inner") + b"\x86R)R.") == []


class Outer:
    class Inner:
        pass


def test_a_class_inside_a_class_is_pickled_by_getattr_under_protocol_2():
    assert unsafe(pickle.dumps([Outer.Inner()], 2)) == ["__builtin__.getattr"]  # of a class that nobody knows
    inside = pickle.dumps([Outer.Inner()], 2).replace(__name__.encode(), b"torch.nn")
    assert unsafe(inside) == []


def test_a_long_chain_of_getattr_takes_no_long_time():
    link = GETATTR[2:]
    data = b"\x80\x02" + link * 50_000 + b"ctorch.x\nEncoding\n" + (text("Inner") + b"\x86R") * 50_000 + b"."
    assert unsafe(data) == []
