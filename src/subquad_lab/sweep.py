"""`subquad sweep`: many values of some fields, each a run; which are best?

A journal file in the folder holds the study, so that several processes share the trials, and a sweep that was stopped
goes on. Who runs a trial holds its lock; a trial that is begun and not locked has lost its process, and the next one
takes it over where its run was.
"""

from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad_lab import RunError, UsageError, runs
from subquad_lab.configs import changed
from subquad_lab.experiments import experiment
from subquad_lab.files import locked
from subquad_lab.records import ABOUT
from subquad_lab.train import Training

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import TrialState

JOURNAL = "journal.log"
Values = dict[str, list[Any]]  # by field


def run(name: str, config: Training, out: Path, trials: int, grid: Values, span: Values) -> None:
    """Run trials until there are enough, and print them, the best first."""
    check(name, config, trials, grid, span)
    study = make_study(out)
    planned = [] if span else [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    with locked(out, wait=True):  # Else two processes that begin at once would both plan the grid.
        for values in planned:
            study.enqueue_trial(values, skip_if_exists=True)
    while (claimed := claim(study, out, grid, span, None if planned else trials, config.seed)) is not None:
        number, values, held = claimed
        with held:
            finish(study, number, name, changed(name, config, values, "sweep"), out)
    show(study, name)


def check(name: str, config: Training, trials: int, grid: Values, span: Values) -> None:
    """Before anything is run: fields that exist, and values that fit them."""
    if not grid and not span:
        raise UsageError("--grid: expected --grid.FIELD A,B,C or --span.FIELD LOW,HIGH, found neither")
    if trials < 1:
        raise UsageError(f"--trials: expected a whole number >= 1, found {trials}")
    for field, values in grid.items():
        for value in values:
            changed(name, config, {field: value}, f"--grid.{field}")
    for field, ends in span.items():
        if len(ends) != 2 or not all(isinstance(end, int | float) for end in ends) or not ends[0] < ends[1]:
            raise UsageError(f"--span.{field}: expected two numbers, the lower first, found {ends}")
        for end in ends:
            changed(name, config, {field: end}, f"--span.{field}")


def make_study(out: Path) -> "Study":
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot make {out}: {error.strerror}") from error
    storage = JournalStorage(JournalFileBackend(str(out / JOURNAL)))
    return optuna.create_study(study_name="sweep", storage=storage, load_if_exists=True)


def claim(
    study: "Study", out: Path, grid: Values, span: Values, most: int | None, seed: int
) -> tuple[int, dict[str, Any], ExitStack] | None:
    """A trial that nobody runs, its values, and its lock; None if there is none left."""
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    with locked(out, wait=True):  # One process at a time looks for work.
        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            try:
                return trial.number, trial.params, hold(out, trial.number)
            except UsageError:  # Its process is alive.
                continue
        if count(study, TrialState.WAITING) == 0 and (most is None or len(study.trials) >= most):
            return None
        # A seed for each trial: one for the study would draw the same again in each process, and after each stop.
        study.sampler = TPESampler(seed=seed + len(study.trials))
        trial = study.ask()
        values = {field: trial.suggest_categorical(field, options) for field, options in grid.items()}
        for field, (low, high) in span.items():
            whole = isinstance(low, int) and isinstance(high, int)
            suggest = trial.suggest_int if whole else trial.suggest_float
            values[field] = suggest(field, low, high, log=low > 0)
        return trial.number, values, hold(out, trial.number)


def hold(out: Path, number: int) -> ExitStack:
    """The lock of a trial: taken now, given back when the result is closed."""
    folder = out / "locks" / folder_of(number)
    folder.mkdir(parents=True, exist_ok=True)
    stack = ExitStack()
    stack.enter_context(locked(folder))
    return stack


def folder_of(number: int) -> str:
    return f"trial-{number:03d}"


def finish(study: "Study", number: int, name: str, config: Training, out: Path) -> None:
    """Train, and tell the study; a run that diverges is a failed trial."""
    from optuna.trial import TrialState

    folder = folder_of(number)
    try:
        started = (out / folder / ABOUT).is_file()
        _, result = runs.resume(out / folder) if started else runs.start(name, config, out, folder)
    except RunError as error:
        print(f"{folder}: {error}")
        study.tell(number, state=TrialState.FAIL)
        return
    study.tell(number, result["valid"][experiment(name).MEASURE])


def count(study: "Study", state: "TrialState") -> int:
    return len(study.get_trials(states=(state,)))


def show(study: "Study", name: str) -> None:
    from optuna.trial import TrialState

    done = study.get_trials(states=(TrialState.COMPLETE,))
    for trial in sorted(done, key=lambda trial: trial.value):
        values = ", ".join(f"{field} {value}" for field, value in trial.params.items())
        print(f"{folder_of(trial.number)}  {experiment(name).MEASURE} {trial.value:.4g}  {values}")
    failed, running = count(study, TrialState.FAIL), count(study, TrialState.RUNNING)
    if failed or running:
        print(f"{failed} trials failed, {running} are run by another process")
