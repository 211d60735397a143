"""The final weights of a run: as an ordinary model (`trained`), and where --init begins."""

from pathlib import Path

from torch import Tensor, nn

from bases import BASES
from common import Streams
from data import load_data
from errors import UsageError
from nets import SIDE, Single, build_model
from user_files import source_checksum

from .disk import differences, kept_of, read


def trained(
    folder: str | Path, method="", trial: int = 0, setting="", data_dir: str = "data"
) -> nn.Module:
    """Returns the model of a run with its final global weights, in evaluation mode.

    folder    where a command's results are, such as runs/fedcl_fgn/001
    method    as in metrics.csv. It can be left out if there is only one
    trial     as in metrics.csv, from 0
    setting   as in metrics.csv, such as "alpha=0.1". It can be left out if there is only one
    data_dir  where the run's data set is. It says what samples and how many classes there are

    The model takes samples as the clients had them, in the run's --dtype: standardised images
    (n, C, H, W), but pixels in [-1, 1] for fedcl_gmm_sync.py, series (n, L, F), tables (n, F) or
    text (n, L). It returns logits (n, classes). Raises UsageError
    unless the folder holds exactly one such run, which has ended and did not diverge.
    """
    options, theta = find(Path(folder), method, trial, setting)
    name = options["model"]
    data = load_data(options["dataset"], data_dir, side=SIDE.get(name, 0))
    projection = getattr(BASES.get(options["base"]), "wants_projection", False)
    given = {"dtype": theta.dtype, "width": options["width"], "norm": options["norm"]}
    model = build_model(name, data, projection=projection, **given)
    if model.size != len(theta):
        raise UsageError(f"{folder}: {len(theta)} weights do not fit into --model {name}")
    model.seed = Streams(options["seed"], options["trial"]).seed("init")
    return Single(model.bind(theta[None], grad=True)).eval()


def initial_weights(run) -> Tensor:
    """Returns the weights (P,) with which a run begins under --init.

    --init names a FOLDER of results. If several methods are there, it is FOLDER:METHOD, because all
    methods of a trial begin with the same weights. They are those of the same trial, or of the only
    one there. If several settings are there, they are those of the run's setting. Raises UsageError
    if the model is another one.
    """
    config = run.config
    trial = run.trial
    folder = Path(config.init)
    method = ""
    if not folder.is_dir():
        name, _, method = config.init.partition(":")
        folder = Path(name)
    trials = {path.stem.rpartition("trial")[2] for path in folder.glob("checkpoints/*-trial*.pt")}
    if len(trials) == 1:
        [trial] = trials
    try:
        options, theta = find(folder, method, trial, "")
    except UsageError:
        options, theta = find(folder, method, trial, run.setting)
    now = {"model": config.model, "width": config.width, "norm": config.norm}
    now["the file of --model, checksum"] = source_checksum(config.model)
    before = {name: options.get(name) for name in now}
    if changes := differences(before, now):
        raise UsageError(f"--init {config.init}: another model ({'; '.join(changes)})")
    return theta


def find(folder: Path, method: str, trial, setting: str) -> tuple[dict, Tensor]:
    """Returns the options of a run, {name: value}, and its final weights (P,)."""
    found = []
    for path in folder.glob(f"checkpoints/*-trial{trial}.pt"):
        options, content = read(path, "cpu")
        is_run = "method" in options  # what `Run.cached` has saved has none
        if is_run and method in ("", options["method"]) and agrees(options, setting):
            found.append((options, kept_of(path, content)))
    whose = f"{folder}, trial {trial}"
    if len(found) != 1:
        advice = "name its folder, method, trial and setting as in metrics.csv"
        raise UsageError(f"{whose}: {len(found)} such runs instead of one; {advice}")
    [(options, kept)] = found
    if kept["diverged"] or not kept["finished"]:
        raise UsageError(f"{whose}: has not ended; {kept['diverged'] or '--resume continues it'}")
    theta = kept["state"].get("theta")
    if not isinstance(theta, Tensor) or options["base"] == "solo":
        raise UsageError(f"{whose}: has no global weights, state['theta'] of all clients")
    return options, theta


def agrees(options: dict, setting: str) -> bool:
    """Whether a run has the options of a setting, as far as its method uses them."""
    shown = f" {setting} "
    for name, value in options.items():
        if f" {name}=" in shown and f" {name}={value} " not in shown:
            return False
    return True
