"""The path of a GPU without one: tensors that say "cuda" and refuse what a GPU would refuse.

Whole commands run on them with real values, and give what they give on the CPU. An operation on
tensors of two devices fails, and `.numpy()` fails. In a local step it fails to wait for a value or
to copy from the host, since the host must run ahead of a GPU. A replay of a recorded step is the
step itself. Not seen are the limits of kernels, cuDNN, NCCL, CUDA graphs, memory and time.

`python tests/test_device.py` runs more commands than the tests do, and prints a table of them. It
runs them on a real GPU if there is one.
"""

import contextlib
import re
import sys
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from reliability import SCRIPTS, in_a_folder, run_line, short_run  # noqa: E402

import data  # noqa: E402
import nets  # noqa: E402
import recording  # noqa: E402
import stacks  # noqa: E402
import training  # noqa: E402
from experiment import machine  # noqa: E402

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.bincount, aten.equal}
WAITS |= {aten._unique2, aten.unique_consecutive, aten.repeat_interleave, aten.allclose}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}  # moves its index
ON_GPU = "on the GPU"  # in checkpoints
COPIES = {aten.copy_, *INDEXING}


def why_not() -> str:
    """Why a GPU cannot be pretended here; nothing where it can."""
    for place, name in (
        (torch._C, "_ensureCUDADeviceGuardSet"),
        (torch._C, "_set_only_lift_cpu_tensors"),
        (_python_dispatch, "_disable_current_modes"),
        (aten, "_fused_sgd_"),
    ):
        if not hasattr(place, name):
            return f"this torch has no {name}"
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")


# ------------------------------------------------------------------------------- the pretended GPU


class OnGpu(torch.Tensor):
    """A tensor of the CPU, `value`, under the GPU's name.

    C++ takes it for a meta tensor, whose autograd asks no GPU.
    """

    @staticmethod
    def __new__(cls, value):
        layout = {"dtype": value.dtype, "device": "meta"}
        size_and_strides = (value.size(), value.stride(), value.storage_offset())
        new = torch.Tensor._make_wrapper_subclass(cls, *size_and_strides, **layout)
        new.value = value
        return new

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: torch.device("cuda", 0))
    is_meta = property(lambda self: False)

    def __getitem__(self, index):
        return super().__getitem__(torch.tensor(index) if isinstance(index, list) else index)

    def new_tensor(self, values):
        return torch.tensor(values, dtype=self.dtype, device="cuda")

    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return GPU.__torch_dispatch__(operation, types, args, kwargs)


class Gpu(_python_dispatch.TorchDispatchMode):
    """Sends operations to the CPU and names their results the GPU's, or refuses them."""

    in_step = False  # whether a local step is being taken
    steps = 0  # how many were taken on images of the GPU

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        ours = {id(x.value): x for x in tensors if isinstance(x, OnGpu)}
        strangers = [x for x in tensors if not isinstance(x, OnGpu)]
        wanted = kind_of(kwargs.get("device"))
        if not ours and not is_made_here(wanted):
            return operation(*args, **kwargs)
        self.refuse(operation, args, kwargs, strangers, wanted)
        if wanted:
            kwargs["device"] = "cpu"
        args, kwargs = tree_map(value_of, (args, kwargs))
        with _python_dispatch._disable_current_modes():
            result = operation(*args, **kwargs)
        if wanted == "cpu":
            return result

        def name_ours(x):
            """What was changed in place stays the same tensor."""
            return ours[id(x)] if id(x) in ours else on_gpu(x)

        return tree_map(name_ours, result)

    def refuse(self, operation, args, kwargs, strangers: list, wanted: str) -> None:
        """RuntimeError for what a GPU cannot do, and for what a local step should not do."""
        name = operation.overloadpacket
        moves = name is aten._to_copy
        crosses = moves and (wanted == "cpu" or bool(strangers))
        crosses = crosses or (name in COPIES and bool(strangers))
        if self.in_step and (crosses or name in WAITS or asks_by_mask(name, args)):
            raise RuntimeError(f"a local step waits for the host: {operation}")
        is_mixed = any(x.dim() for x in strangers)  # numbers of the CPU may join in
        if is_mixed and not crosses and not moves:
            raise RuntimeError(f"{operation}: tensors on the CPU and on the GPU")
        if name is aten._fused_sgd_:
            check_fused(*args[:3], kwargs["momentum"])

    def synchronize(self, *_) -> None:
        if self.in_step:
            raise RuntimeError("a local step waits for the host: synchronize")


GPU = Gpu()


def kind_of(device) -> str:
    """cpu, cuda, meta, or nothing."""
    return "" if device is None else torch.device(device).type


def is_made_here(wanted: str) -> bool:
    """Whether a new tensor is the GPU's. Those like one of ours are asked for as meta tensors."""
    if wanted != "meta":
        return wanted == "cuda"
    frame = sys._getframe()  # but a model's skeleton is of real meta tensors
    while frame and frame.f_code.co_name not in ("_apply", "__deepcopy__"):
        frame = frame.f_back
    return frame is None


def value_of(x):
    return x.value if isinstance(x, OnGpu) else x


def on_gpu(x):
    return OnGpu(x) if isinstance(x, torch.Tensor) else x


def is_named(x) -> bool:
    """Whether x is how a checkpoint holds a tensor of the GPU."""
    return isinstance(x, dict) and ON_GPU in x


def asks_by_mask(name, args) -> bool:
    """Whether an index is a mask, of which the host must know how many entries are true."""
    if name not in INDEXING:
        return False
    return any(x.dtype == torch.bool for x in args[1] if x is not None)


def check_fused(w: list, g: list, v: list, momentum: float) -> None:
    """What the CUDA kernel of fused SGD asks of its lists, and the CPU's does not."""
    if bool(v) != (momentum > 0):
        raise RuntimeError("_fused_sgd_: a list of velocities exactly where there is momentum")
    for same in zip(w, g, v or w, strict=True):
        for x in same:
            is_dense = x.value.is_contiguous() and x.stride() == same[0].stride()
            if not is_dense or x.dtype != w[0].dtype or x.shape != same[0].shape:
                raise RuntimeError("_fused_sgd_: tensors of different types, sizes or strides")


def take_again(self, step):
    """A recording of the pretended GPU."""
    return step


@contextlib.contextmanager
def pretended_gpu():
    """torch finds one GPU. Checkpoints hold the values, as they would."""
    train_group = stacks.Stack.train_group
    step_alone = training.SGD.step
    save = torch.save
    load = torch.load

    def watched_step(self, *args):
        GPU.in_step = True
        GPU.steps += isinstance(self.images, OnGpu)
        try:
            return train_group(self, *args)
        finally:
            GPU.in_step = False

    def counted_step(self):
        GPU.steps += all(isinstance(weight, OnGpu) for weight in self.velocity)
        step_alone(self)

    def save_values(content, file):
        save(tree_map(lambda x: {ON_GPU: x.value} if isinstance(x, OnGpu) else x, content), file)

    def load_values(path, map_location, **options):
        content = load(path, map_location="cpu", **options)
        storage = mock.Mock()  # notes where a storage of the GPU is sent
        if map_location != "cpu":
            map_location(storage, "cuda:0")
        is_sent = storage.to.called and storage.to.call_args.kwargs["device"].type == "cuda"

        def place(x):
            if not is_named(x):
                return x
            return on_gpu(x[ON_GPU]) if is_sent else x[ON_GPU]

        return tree_map(place, content, is_leaf=is_named)

    torch._C._ensureCUDADeviceGuardSet()
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    data.read_data.cache_clear()
    machine.gpu_fault.cache_clear()
    with contextlib.ExitStack() as stack:
        patched = {  # a function for each: torch's compiler refuses one of two names
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_name": lambda *_: "pretended",
            "synchronize": GPU.synchronize,
            "is_current_stream_capturing": lambda: False,
            "manual_seed_all": lambda seed: None,
            "set_device": lambda *_: None,
            "_lazy_init": lambda: None,
        }
        stack.enter_context(mock.patch.multiple(torch.cuda, **patched))
        stack.enter_context(mock.patch.multiple(torch, save=save_values, load=load_values))
        stack.enter_context(mock.patch.object(stacks.Stack, "train_group", watched_step))
        stack.enter_context(mock.patch.object(training.SGD, "step", counted_step))
        stack.enter_context(mock.patch.object(recording, "side_stream", contextlib.nullcontext))
        stack.enter_context(mock.patch.object(recording.Recording, "record", take_again))
        stack.enter_context(GPU)
        yield GPU
    data.read_data.cache_clear()
    machine.gpu_fault.cache_clear()
    torch._C._set_only_lift_cpu_tensors(before)


# ---------------------------------------------------------------------------------------- commands

COMMANDS = (  # in the suite
    "fedcl_fgn --base vrlsgd",
    "fedavg_curriculum --order curriculum --base scaffold --momentum 0.5 --score LG",
    "client_curriculum --client-order curriculum --base moon --model fedgen-cnn",
    "fedcl_gmm_sync --method fedcl fedgen feddistill+ --rounds 2",
    "fedac_art --method fedac --augment crop-flip --projection",
    "results.fedac_art.controls --method fedac --features encoder --warmup 1",
    "fedcl_fgn --method cl --fgn per_sample --base fedyogi",
)
MORE = (
    "fedcl_fgn --detector fim --detect-samples 3",
    *("fedavg_curriculum --order curriculum anti random vanilla", "client_curriculum"),
    *("fedavg_curriculum --score E", "fedavg_curriculum --model resnet9", "fedac_art"),
    *("fedavg_curriculum --model mine.py:Net --momentum 0.5", "fedac_art --base moon"),
    *("fedavg_curriculum --base fedprox", "fedavg_curriculum --base fednova"),
    *("fedavg_curriculum --base fedyogi", "fedac_art --base solo --clients-per-round 4"),
    *(
        "fedavg_curriculum --hold-out 0.2 --per-client",
        "fedavg_curriculum --norm group --model fedgen-cnn",
    ),
    "fedcl_gmm_sync --rounds 2 --method fedcl fedgen fedavg fedprox fedensemble",
    "fedcl_gmm_sync --rounds 2 --method feddistill feddistill+",
    *("results.fedac_art.controls", "results.fedac_art.controls --features pooled --flip 0.2"),
    *("results.fedavg_curriculum.explain", "results.fedavg_curriculum.exposure"),
    *("results.fedavg_curriculum.rivals --fedlc 0 1", "results.client_curriculum.rivals"),
    *("results.fedcl_fgn.selection --budget 4 --rounds 4", "results.fedcl_fgn.criticalfl"),
    "results.fedcl_fgn.selection --budget 4 --rounds 4 --method base --select hics",
    "results.fedcl_fgn.selection --budget 4 --rounds 4 --method base --select fedcor",
    "results.fedcl_fgn.clock --budget 4 --rounds 4",
    *("results.fedcl_gmm_sync.controls --rounds 2", "results.fedcl_gmm_sync.clock --rounds 2"),
)
OWN = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, channels, side, classes):
        convolution = nn.Conv2d(channels, 4, 3, 2)
        layers = [convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
        super().__init__(*layers, nn.Linear(4 * ((side - 1) // 2) ** 2, classes))
"""


@contextlib.contextmanager
def counted_replays():
    """A list with an entry for each replay. A built-in model whose steps are not recorded fails."""
    replays = []
    can_record = recording.can_record

    def must_record(stack):
        is_due = len(stack.index) and stack.model.is_recordable
        if is_due and not can_record(stack):
            raise TypeError(f"a step is not recorded: {stack.local}")
        return can_record(stack)

    record = recording.Recording.record

    def counted(self, step):
        replay = record(self, step)

        def replay_and_count():
            replays.append(self.stack.model.device)
            replay()

        return replay_and_count

    runs_are_short = mock.patch.object(recording, "WARM_UP", 1)
    all_record = mock.patch.object(recording, "can_record", must_record)
    counting = mock.patch.object(recording.Recording, "record", counted)
    with runs_are_short, all_record, counting, warnings.catch_warnings():
        warnings.filterwarnings("error", message="training goes on without CUDA graphs")
        yield replays


def compare(command: str) -> tuple[int, float, int]:
    """How many rows a command gives, how far those of the GPU are from the CPU's, relative, and how
    many steps the GPU replayed.

    The run is short, and in float64.
    """
    module, *flags = command.split()
    [script] = [name for name in SCRIPTS if name in module]
    folder = Path(re.sub(r"\W+", "-", command))
    tables = []
    for device in ("cpu", "cuda"):
        data.read_data.cache_clear()
        steps = "--local-steps=4" if "gmm" in script else "--epochs=3"  # most are alike
        line = [*short_run(script), "--dtype=float64", steps, *flags]
        line += [f"--device={device}", f"--out={folder / device}"]
        is_pretended = device == "cuda" and not torch.cuda.is_available()
        GPU.steps = 0
        gpu = pretended_gpu() if is_pretended else contextlib.nullcontext()
        with gpu, counted_replays() as replays:
            status, _, errors = run_line(module, line)
        recording.KEPT.clear()
        if status:
            raise RuntimeError(f"--device {device}: exit {status}: {errors[-2000:]}")
        if is_pretended and not GPU.steps:
            raise RuntimeError("no step was taken on the GPU")
        tables.append(pd.read_csv(folder / device / "metrics.csv"))
    one, other = [table.select_dtypes("number").drop(columns="seconds") for table in tables]
    pd.testing.assert_frame_equal(one, other, rtol=1e-6, atol=1e-9)
    distance = (one - other).abs() / one.abs().clip(lower=1e-9)
    return len(one), float(distance.max().max()), len(replays)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_a_gpu_equals_that_on_a_cpu(command):
    with in_a_folder():
        rows, _, replays = compare(command)
    assert rows > 0
    assert replays > 0


def test_a_users_model_on_a_gpu_equals_that_on_a_cpu():
    with in_a_folder() as folder:
        (folder / "mine.py").write_text(OWN)
        rows, _, _ = compare("fedavg_curriculum --model mine.py:Net --momentum 0.5")
    assert rows > 0


def test_what_a_gpu_refuses():
    with pretended_gpu() as gpu:
        x = torch.zeros(3, device="cuda")
        with pytest.raises(RuntimeError, match="on the CPU and on the GPU"):
            x + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        assert (x + 1).cpu().tolist() == [1, 1, 1]
        waits = [lambda: x.sum().item(), lambda: x[x > 0], lambda: torch.ones(3).to("cuda"), x.cpu]
        waits += [x.unique, torch.cuda.synchronize, lambda: torch.allclose(x, x)]
        gpu.in_step = True
        for wait in waits:
            with pytest.raises(RuntimeError, match="waits for the host"):
                wait()
        gpu.in_step = False
        with pytest.raises(RuntimeError, match="velocities"):
            torch._fused_sgd_([x], [x], [x], weight_decay=0, momentum=0, lr=0.1, dampening=0,
                              nesterov=False, maximize=False, is_first_step=False)  # fmt: skip


@pytest.mark.parametrize("error", [torch.AcceleratorError, torch.OutOfMemoryError])
def test_what_the_machine_lacks_is_no_fault_of_a_users_model(error):
    def fails(x):
        raise error("CUDA error")

    net = nn.Identity()
    net.forward = fails
    with pytest.raises(error):
        nets.PlainNet("mine.py:Net", net, 2, True).features(torch.zeros(1))


def describe(command: str) -> tuple[str, bool]:
    """A line of the table, and whether the command failed or recorded no step."""
    try:
        rows, difference, replays = compare(command)
    except Exception as error:
        return f"| `{command}` | | | {error} |", True
    is_recorded = replays > 0 or "mine.py" in command  # a user's own model
    return f"| `{command}` | {rows} | {replays} | {difference:.0e} |", not is_recorded


def compare_dropout() -> tuple[int, float]:
    """How many steps with dropout a GPU replays, and how far their weights are from those of steps
    that are not recorded."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    images = data.from_arrays(x, np.arange(60) % 4, x[:10], np.arange(10) % 4, device="cuda")
    model = nets.build_model("alexnet", images, "cuda", torch.float64, width=64)
    batches = [rng.integers(60, size=(steps, 4)) for steps in (20, 12, 5)]
    local = training.Local(0.05, momentum=0.5, seeds=[1, 2, 3])
    thetas = []
    with counted_replays() as replays:
        for is_recordable in (True, False):
            model.is_recordable = is_recordable
            update = training.train(model, model.init(0), images, np.arange(3), batches, local)
            thetas.append(update.rows)
    recording.KEPT.clear()
    return len(replays), float((thetas[0] - thetas[1]).abs().max())


def main() -> None:
    """Prints a line for each command; ends with 1 if one fails."""
    faults = 0
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "a pretended GPU", "\n")
    print("| command | rows | replayed steps | largest difference, relative |\n|---|---|---|---|")
    with in_a_folder() as folder:
        (folder / "mine.py").write_text(OWN)
        for command in (*COMMANDS, *MORE):
            row, is_fault = describe(command)
            print(row, flush=True)
            faults += is_fault
    if torch.cuda.is_available():
        replays, difference = compare_dropout()
        print(f"\nAlexNet with dropout: {replays} replayed steps, largest difference {difference}")
        faults += replays == 0 or difference > 1e-12
    sys.exit(faults > 0)


if __name__ == "__main__":
    if why_not() and not torch.cuda.is_available():
        sys.exit(why_not())
    main()
